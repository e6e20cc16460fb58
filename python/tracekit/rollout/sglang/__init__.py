"""SGLang as the sampler: a plugin inside the engine that rounds and records, and a client that trains from it.

Nothing here imports SGLang before an engine is started; `plugin` and `platform` are loaded by SGLang itself, through
its entry points, in each of its processes.
"""
