"""The learner: a torchtitan model whose forward rounds as the sampler did."""
