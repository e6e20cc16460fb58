"""Tasks: problems with graders, a character tokenizer, and the order in which prompts are drawn."""

from tracekit.tasks.sampler import PromptSampler
from tracekit.tasks.task import Problem, Task, check_fits, load_task
from tracekit.tasks.tokenizer import CharTokenizer

__all__ = ["CharTokenizer", "Problem", "PromptSampler", "Task", "check_fits", "load_task"]
