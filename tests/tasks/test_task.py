import subprocess
import sys

import pytest

from tracekit import config as tk
from tracekit.config.schema import TaskConfig
from tracekit.errors import ConfigError
from tracekit.tasks import CharTokenizer, check_fits, load_task

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def sums(**arguments):
    return TaskConfig(**{"name": "chain_sum", "params": SUMS, "train_size": 5000, "eval_size": 256, **arguments})


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_held_out_prompt_is_among_the_training_prompts(seed):
    task = load_task(sums(), seed)
    held_out = [problem.prompt for problem in task.eval]
    assert len(set(held_out)) == len(held_out) == 256
    assert not {problem.prompt for problem in task.train} & set(held_out)


def test_the_exclusion_has_something_to_exclude():
    """The check above would pass by luck on a wide space; here two thirds of all problems are held out."""
    task = load_task(sums(params={**SUMS, "max_digits": 1}, eval_size=130, train_size=500), 0)
    held_out = {problem.prompt for problem in task.eval}
    raw = {f"{a}{op}{b}=" for a in range(10) for b in range(10) for op in "+-"}
    assert held_out < raw
    assert {problem.prompt for problem in task.train} <= raw - held_out


def test_a_space_without_training_problems_is_refused():
    with pytest.raises(ConfigError, match="no problem left to train on|only .* distinct problems"):
        load_task(sums(params={**SUMS, "max_digits": 1}, eval_size=200), 0)


def test_problems_depend_on_task_seed_and_index_only():
    first, again, other = load_task(sums(), 0), load_task(sums(), 0), load_task(sums(), 1)
    assert [first.train[i] for i in (7, 3)] == [again.train[i] for i in (7, 3)]
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.eval == other.eval
    train, shifted = ({problem.prompt for problem in task.train} for task in (first, other))
    assert len(train & shifted) < 0.6 * len(train)
    with pytest.raises(IndexError):
        first.train[5000]


@pytest.mark.parametrize("name", ["chain_sum", "basic_arithmetic", "products", "decimal_chain_sum"])
def test_arithmetic_prompts_are_bare_expressions(name):
    task = load_task(TaskConfig(name=name, eval_size=32, train_size=32), 0)
    for problem in task.eval:
        assert problem.prompt.endswith("=") and set(problem.prompt) <= set("0123456789+-*/().=")
        assert task.grade(problem, problem.answer) == 1.0
    assert CharTokenizer.for_task(task).vocab_size == 4 + len("0123456789+-*/().=")


def test_other_prompts_are_the_question_itself():
    task = load_task(TaskConfig(name="letter_counting", eval_size=8, train_size=8), 0)
    assert task.eval[0].prompt == task.eval[0].entry["question"]
    assert CharTokenizer.for_task(task).vocab_size > 90


def test_the_expression_is_the_problem():
    for problem in load_task(sums(), 0).eval:
        assert str(eval(problem.prompt[:-1])) == problem.answer


def test_grading_is_strict():
    task = load_task(sums(), 0)
    problem = next(problem for problem in task.eval if len(problem.answer) == 2 and problem.answer.isdigit())
    assert task.grade(problem, problem.answer) == 1.0
    digits = problem.answer
    wrong = ["", digits + "0", digits[:1], "-" + digits, digits + "\ufffd", f"={digits}", f"{digits} {digits}", "abc"]
    assert [response for response in wrong if task.grade(problem, response) != 0.0] == []


def test_part_marks_do_not_count():
    task = load_task(TaskConfig(name="letter_counting", eval_size=4, train_size=4), 0)
    problem = task.eval[0]
    response = f"the answer is {problem.answer}"
    assert 0 < task.score(problem, response) < 1
    assert task.grade(problem, response) == 0.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TaskConfig(name="chain_sums"), "the nearest is chain_sum"),
        (
            sums(params={"max_term": 3}),
            "unknown key task.params.max_term of chain_sum; the nearest valid key is max_te",
        ),
        (sums(params={"min_terms": 3, "max_terms": 2}), "chain_sum rejects them: max_terms must be >= min_terms"),
        (sums(params={"max_terms": "two"}), "chain_sum rejects them"),
        (sums(params={"seed": 1}), "task.params.seed is set by seed"),
    ],
)
def test_a_wrong_task_is_a_one_line_error(config, message):
    with pytest.raises(ConfigError) as error:
        load_task(config, 0)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_answers_and_prompts_must_fit():
    task = load_task(sums(), 0)
    tokenizer = CharTokenizer.for_task(task)
    prompt, answer = check_fits(task, tokenizer, tk.load([], {"rollout.max_response_len": 4}))
    assert 5 < prompt < 8 and 2 < answer < 5
    with pytest.raises(ConfigError, match="answers of 4 tokens with the EOS"):
        check_fits(task, tokenizer, tk.load([], {"rollout.max_response_len": 3}))
    with pytest.raises(ConfigError, match="prompts of 7 tokens, and a response takes up to 4"):
        check_fits(task, tokenizer, tk.load([], {"rollout.max_response_len": 4, "model.max_seq_len": 10}))


def test_one_data_set_is_imported_without_the_rest_and_the_package_stays_whole():
    code = """
import sys, time
start = time.perf_counter()
from tracekit.config.schema import TaskConfig
from tracekit.tasks import load_task
task = load_task(TaskConfig(eval_size=16), 0)
spent = time.perf_counter() - start
assert "sympy" not in sys.modules and "matplotlib" not in sys.modules and "torch" not in sys.modules
assert not [name for name in sys.modules if name.startswith("reasoning_gym")]
assert spent < 2, spent
import reasoning_gym
assert reasoning_gym.create_dataset("chain_sum", size=3, seed=1)[0]["question"]
assert len(reasoning_gym.factory.DATASETS) > 90
assert task.grade(task.eval[0], task.eval[0].answer) == 1.0
"""
    subprocess.run([sys.executable, "-c", code], check=True)
