"""Rewards while rows are written, and generations that are written while earlier ones train."""

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.language import ahead
from datamodules.language.ahead import WrittenAhead
from datamodules.language.reward_calls import RewardFunctions
from datamodules.language.reward_threads import EarlyRewards
from rl_modules.common.errors import UsageError
from rl_modules.language.rlhf_ppo import RLHFPPO
from rl_modules.language.sampling import Completions, NativeSampler
from rl_modules.language.sampling.remote import ServerSampler
from tests.rl_modules.language.fake_vllm_server import FakeServer, running_server
from tests.rl_modules.language.test_grpo import TINY, Spy, addition, built, spy, weights_of
from tests.training import assert_resumes_exactly, fit

HERE = "tests.datamodules.language.test_overlap"


def slow_reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Sleeps 50 ms per completion."""
    time.sleep(0.05 * len(completions))
    return [sum(map(ord, text)) % 5 / 4 for text in completions]


def raises_on_some(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    if any(sum(map(ord, text)) % 3 == 0 for text in completions):
        raise ValueError("no")
    return [float(len(text)) for text in completions]


# ---------------------------------------------------------------- rewards of early rows


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("reward", ["digit_reward", "raises_on_some"])
def test_early_rewards_are_those_of_the_whole_batch(reward: str, workers: int) -> None:
    name = f"{HERE}:raises_on_some" if reward == "raises_on_some" else None
    arguments: dict[str, Any] = {} if name is None else {"reward_funcs": [name]}
    results = []
    for overlap in (False, True):
        module = spy()
        fit(module, addition(**arguments, reward_overlap=overlap, reward_workers=workers), max_steps=2)
        results.append(module)
    (one, _), (two, _) = results[0].rollouts[-1], results[1].rollouts[-1]
    assert torch.equal(one["rewards"].nan_to_num(-7), two["rewards"].nan_to_num(-7))
    assert one["failed"] == two["failed"]
    assert torch.equal(weights_of(results[0]), weights_of(results[1]))


def test_a_group_is_judged_while_others_are_written() -> None:
    """The first group's reward has been called before the second group's last row is announced."""
    called = threading.Event()

    def reward(completions: Any, **columns: Any) -> list[float]:
        called.set()
        return [1.0] * len(completions)

    class Tokenizer:
        def batch_decode(self, ids: Any, skip_special_tokens: bool) -> list[str]:
            return [str(row) for row in ids]

    records = [{"prompt": "a"}, {"prompt": "b"}]
    early = EarlyRewards(RewardFunctions([reward]), Tokenizer(), records, 2)
    early.on_ended(2, [5], True)
    early.on_ended(1, [6], True)
    early.on_ended(0, [7], True)
    assert called.wait(10)
    early.on_ended(3, [8], False)
    assert early.result([records[0]] * 2 + [records[1]] * 2, ["t"] * 4).flatten().tolist() == [1.0] * 4


def test_the_completion_that_failed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Not one of the first prompt, whose rewards are a part of the batch as well."""

    class Tokenizer:
        def batch_decode(self, ids: Any, skip_special_tokens: bool) -> list[str]:
            return [f"text {row[0]}" for row in ids]

    def reward(completions: Any, **columns: Any) -> list[float]:
        return [1 / (text != "text 7") for text in completions]

    records = [{"prompt": "a"}, {"prompt": "b"}]
    early = EarlyRewards(RewardFunctions([reward]), Tokenizer(), records, 2)
    for row in range(4):
        early.on_ended(row, [4 + row])
    rewards = early.result([records[0]] * 2 + [records[1]] * 2, [f"text {i}" for i in (4, 5, 6, 7)])
    assert rewards[:3, 0].tolist() == [1.0] * 3 and bool(rewards[3, 0].isnan())
    assert "on 1 of 4 completions, such as 'text 7'" in capsys.readouterr().out


@pytest.mark.long
def test_overlapped_runs_resume_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(
        lambda: Spy(model_config=TINY, max_completion_length=5, learning_rate=1e-3, completions_steps=0,
                    lr_scheduler_type="constant"),
        lambda: addition(steps_per_generation=2, reward_overlap=True, reward_workers=2), tmp_path, 3,
    )  # fmt: skip


def test_an_error_of_a_reward_ends_the_run_under_overlap_too() -> None:
    with pytest.raises(UsageError, match="raised ZeroDivisionError"):
        fit(spy(), addition(reward_funcs=[f"{HERE}:broken"], reward_overlap=True), max_steps=1)


def broken(completions: Any, **columns: Any) -> list[float]:
    return [1 / 0 for _ in completions]


@pytest.mark.parametrize("more", [{}, {"reward_overlap": True}, {"async_generations": 1}, {"reward_workers": 2}])
def test_a_run_has_one_event_loop_which_it_closes(more: dict[str, Any]) -> None:
    loops, lock = set(), asyncio.Lock()

    async def reward(completions: Any, **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        async with lock:  # belongs to the loop in which a call first waits for it
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0.001)
        return [float(len(text)) for text in completions]

    for runs in (1, 2):
        lock = asyncio.Lock()
        module = spy()
        fit(module, addition(reward_funcs=[reward, reward], **more), max_steps=2)
        assert not any(rollout["rewards"].isnan().any() for rollout, _ in module.rollouts)
        assert len(loops) == runs and all(loop.is_closed() for loop in loops)


# ---------------------------------------------------------------- the queue of rounds


def written(value: int) -> Completions:
    one = torch.full((2, 1), value, dtype=torch.int64)
    return Completions(one, one.float(), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), one[:, 0])


def test_rounds_come_in_order_and_survive_a_restart_once_each() -> None:
    gate, asked = threading.Event(), []

    def write(first: int) -> Completions:
        asked.append(first)
        if first == 8:
            gate.wait(10)
        return written(first)

    queue = WrittenAhead(write)
    for first in (0, 4, 8, 12):
        queue.ask(first)
    assert queue.take()[0] == 0
    while len(asked) < 3:
        time.sleep(0.01)
    state = queue.state_dict()
    assert [(saved["first"], saved["written"] is not None) for saved in state["rounds"]] == [
        (4, True),
        (8, False),
        (12, False),
    ]
    gate.set()
    again: list[int] = []
    other = WrittenAhead(lambda first: again.append(first) or written(first))  # type: ignore[func-returns-value]
    other.load_state_dict(state, "cpu")
    other.start()
    taken = [other.take() for _ in range(3)]
    assert [first for first, _ in taken] == [4, 8, 12]
    assert [int(completions.tokens[0, 0]) for _, completions in taken] == [4, 8, 12]
    assert again == [8, 12]  # the finished round was kept
    queue.stop()
    other.stop()


def test_rows_are_replaced_in_place() -> None:
    long = Completions(torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.zeros((2, 3), dtype=torch.float32),
                       torch.tensor([3, 1]), torch.tensor([True, False]), torch.tensor([0, 0]))  # fmt: skip
    short = Completions(torch.tensor([[9]]), torch.ones((1, 1), dtype=torch.float32), torch.tensor([1]),
                        torch.tensor([True]), torch.tensor([5]))  # fmt: skip
    found = ahead.replaced(long, [0], short, 0)
    assert found.tokens.tolist() == [[9], [4]] and found.length.tolist() == [1, 1]
    assert found.version is not None and found.version.tolist() == [5, 0] and found.finished.tolist() == [True, False]


# ---------------------------------------------------------------- runs


def asynchronous(address: str, k: int = 2, **arguments: Any) -> tuple[Spy, Any]:
    module = spy(sampler="vllm_server", sampler_options={"addresses": [address], "retries": 20, "retry_wait_s": 0.05},
                 learning_rate=1e-2, **arguments)  # fmt: skip
    return module, addition(async_generations=k)


def prompts_of(module: Spy) -> list[str]:
    return [record["prompt"] for rollout, _ in module.rollouts for record in rollout["records"][::4]]


@pytest.mark.long
@pytest.mark.parametrize("k", [1, 2])
def test_generations_are_written_by_weights_at_most_k_updates_old(k: int) -> None:
    versions: list[Any] = []

    class Noting(Spy):
        def prepare(self, rollout: Any) -> Any:
            versions.append((self.trainer.global_step, rollout["version"]))
            return super().prepare(rollout)

    with running_server(built(spy())) as (_, address):
        module, data = asynchronous(address, k)
        module.__class__ = Noting
        fit(module, data, max_steps=8)
    native = spy(learning_rate=1e-2)
    fit(native, addition(), max_steps=8)
    assert prompts_of(module) == prompts_of(native)  # the same prompts in the same order
    behind = torch.stack([step - version.max() for step, version in versions])
    assert int(behind.min()) >= 0 and int(max(step - int(v.min()) for step, v in versions)) <= k
    assert int(behind.max()) >= 1  # it did write ahead
    assert module.latest_metrics["train/sampling/steps_behind"] > 0


def test_rows_of_older_weights_are_written_again(monkeypatch: Any) -> None:
    """A sampler whose weights stay behind: its rows are asked again after an update."""
    sample = ServerSampler.sample

    def behind(*arguments: Any, **more: Any) -> Completions:
        written = sample(*arguments, **more)
        assert written.version is not None
        return replace(written, version=torch.where(written.version == 3, 0, written.version))

    monkeypatch.setattr(ServerSampler, "sample", behind)
    with running_server(built(spy())) as (_, address):
        module, data = asynchronous(address, 1)
        generations = []
        again = ahead.without_stale

        def noting(data: Any, records: Any, seeds: Any, rows: Completions) -> Completions:
            fresh = again(data, records, seeds, rows)
            generations.append((rows.version.clone(), fresh.version.clone()))
            return fresh

        monkeypatch.setattr(ahead, "without_stale", noting)
        fit(module, data, max_steps=7)
    changed = [(old, new) for old, new in generations if not torch.equal(old, new)]
    assert changed and all((new > old).all() for old, new in changed)


class Flaky(FakeServer):
    """Breaks off at some completions, as a server that is killed and started again: it then lacks its weights."""

    calls = 0

    def generate(self, *arguments: Any, **more: Any) -> Any:
        Flaky.calls += 1
        if Flaky.calls % 40 == 2:
            self.version = "default"
            raise ConnectionError
        return super().generate(*arguments, **more)


@pytest.mark.long
def test_a_server_that_fails_is_asked_again_and_no_prompt_is_lost() -> None:
    with running_server(built(spy()), kind=Flaky) as (_, address):
        module, data = asynchronous(address, 1)
        fit(module, data, max_steps=6)
    native = spy(learning_rate=1e-2)
    fit(native, addition(), max_steps=6)
    assert prompts_of(module) == prompts_of(native)


@pytest.mark.long
def test_another_server_takes_over() -> None:
    model = built(spy())
    with running_server(model) as (_, one), running_server(model, kind=Flaky) as (_, two):
        module = spy(sampler="vllm_server", sampler_options={"addresses": [two, one, "127.0.0.1:9"], "retries": 3,
                                                             "retry_wait_s": 0.01})  # fmt: skip
        fit(module, addition(), max_steps=3)
    native = spy()
    fit(native, addition(), max_steps=3)
    for (ours, _), (theirs, _) in zip(module.rollouts, native.rollouts, strict=True):
        assert torch.equal(ours["tokens"], theirs["tokens"])


@pytest.mark.long
@pytest.mark.parametrize("stop", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_resumed_run_reads_each_prompt_once(stop: int, tmp_path: Path) -> None:
    with running_server(built(spy())) as (_, address):
        (whole, data), (first, part), (second, rest) = (asynchronous(address) for _ in range(3))
        fit(whole, data, max_steps=8)
        trainer = fit(first, part, max_steps=stop)
        trainer.save_checkpoint(tmp_path / "stopped.ckpt")
        fit(second, rest, tmp_path / "stopped.ckpt", max_steps=8)
    assert prompts_of(first) + prompts_of(second) == prompts_of(whole)


def test_without_any_server_the_run_says_so() -> None:
    options = {"addresses": ["127.0.0.1:9"], "retries": 5, "retry_wait_s": 0.01}
    with pytest.raises(UsageError, match=r"none of 127.0.0.1:9 answers after 5 retries \(.*\); start `rl serve` there"):
        fit(spy(sampler="vllm_server", sampler_options=options), addition(), max_steps=1)


def test_async_needs_a_correction() -> None:
    module = RLHFPPO(model_config=TINY, sampler="vllm_server", sampler_options={"addresses": ["127.0.0.1:9"]})
    with pytest.raises(UsageError, match="which RLHFPPO does not correct for"):
        fit(module, addition(async_generations=1), max_steps=1)


# ---------------------------------------------------------------- rounds that this process writes ahead


def of_the_state(completions: Any, trainer_state: Any, **columns: Any) -> list[float]:
    """Depends on when it is asked, and on the last logged metrics."""
    seen = trainer_state.global_step + len(trainer_state.log_history)
    return [(sum(map(ord, text)) + seen) % 5 / 4 for text in completions]


class Noted(Spy):
    """Keeps the step and the rows' versions of each generation."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.versions: list[tuple[int, list[int]]] = []

    def prepare(self, rollout: Any) -> Any:
        version = rollout["version"]
        self.versions.append((self.trainer.global_step, [] if version is None else version.unique().tolist()))
        return super().prepare(rollout)


def noted(**arguments: Any) -> Noted:
    return Noted(model_config=TINY, max_completion_length=5, learning_rate=1e-2, completions_steps=0,
                 lr_scheduler_type="constant", **arguments)  # fmt: skip


@pytest.mark.parametrize("k", [1, 2])
def test_this_process_writes_k_generations_ahead_with_the_prompts_in_order(k: int) -> None:
    module, native = noted(), spy(learning_rate=1e-2)
    fit(module, addition(async_generations=k, reward_funcs=[f"{HERE}:of_the_state"]), max_steps=6)
    fit(native, addition(), max_steps=6)
    assert prompts_of(module) == prompts_of(native)
    assert module.versions == [(step, [max(0, step - k)]) for step in range(6)]
    behind = sum(min(step, k) for step in range(6)) / 6
    assert module.latest_metrics["train/sampling/steps_behind"] == pytest.approx(behind)
    # Each generation is the one that the weights of its version write.
    assert torch.equal(module.rollouts[0][0]["tokens"], native.rollouts[0][0]["tokens"])
    for step, (rollout, _) in enumerate(module.rollouts):
        asked_at = max(0, step - k)
        seen = asked_at + (asked_at >= module.logging_steps)
        judged = [(sum(map(ord, text)) + seen) % 5 / 4 for text in rollout["texts"]]
        assert rollout["rewards"].flatten().tolist() == judged


def test_generations_written_ahead_are_corrected_for() -> None:
    module = noted()
    fit(module, addition(async_generations=1), max_steps=4)
    assert module.correction == "sequence_mask"
    assert module.latest_metrics["train/sampling/importance_ratio/mean"] != 1.0
    _, fields = module.rollouts[-1]
    assert not torch.allclose(fields["log_prob"], fields["sampling_log_prob"])
    fit(module, addition(), max_steps=1)
    assert module.correction == "none"


def test_without_correction_the_ratio_is_that_to_the_weights_that_wrote() -> None:
    ratios: list[bool] = []

    class Ratio(Noted):
        def policy_loss(self, log_prob: Any, batch: Any) -> Any:
            ratios.append(torch.equal(log_prob.detach(), batch["log_prob"]))
            return super().policy_loss(log_prob, batch)

    module = noted(importance_sampling_correction="none")
    module.__class__ = Ratio
    fit(module, addition(async_generations=1), max_steps=4)
    assert ratios == [True, False, False, False]  # the first generation alone is of the present weights


@pytest.mark.long
@pytest.mark.parametrize("arguments", [{}, {"dynamic_sampling": 2}, {"steps_per_generation": 2}], ids=str)
def test_generations_written_ahead_resume_exactly(arguments: dict[str, Any], tmp_path: Path) -> None:
    def make_data() -> Any:
        return addition(async_generations=2, reward_funcs=[f"{HERE}:of_the_state"], **arguments)

    # A run that ends writes a last point of the curves, so that every step has one.
    assert_resumes_exactly(lambda: noted(logging_steps=1), make_data, tmp_path, 3)


@pytest.mark.long
def test_a_reward_that_reads_the_log_resumes_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(
        lambda: noted(logging_steps=1), lambda: addition(reward_funcs=[f"{HERE}:of_the_state"]), tmp_path, 5
    )


def test_a_run_that_is_resumed_without_async_loses_no_prompt(tmp_path: Path) -> None:
    first, second, native = noted(), noted(), noted()
    fit(first, addition(async_generations=2), max_steps=3).save_checkpoint(tmp_path / "stopped.ckpt")
    fit(second, addition(), tmp_path / "stopped.ckpt", max_steps=8)
    fit(native, addition(), max_steps=8)
    assert prompts_of(first) + prompts_of(second) == prompts_of(native)


def test_rewards_are_computed_while_the_last_generation_trains() -> None:
    trained, asked = threading.Event(), []
    data = addition(async_generations=1)

    def waits(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        is_first = prompts[0] in [record["prompt"] for record in data.records(range(4))]
        asked.append(is_first or trained.wait(30))
        return [sum(map(ord, text)) % 5 / 4 for text in completions]

    class Training(Noted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            trained.set()
            return super().training_step(batch, batch_idx)

    module = noted()
    module.__class__ = Training
    data = addition(async_generations=1, reward_funcs=[waits])
    fit(module, data, max_steps=2)
    assert len(asked) > 4 and all(asked)


class Breaks(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RuntimeError("broken")


class BreaksOff(NativeSampler):
    def sample(self, *arguments: Any, **options: Any) -> Any:
        super().sample(*arguments, **options)
        raise RuntimeError("broken")


@pytest.mark.long
@pytest.mark.parametrize("when", ["training", "writing"])
def test_an_exception_ends_the_calls_that_wait(when: str) -> None:
    threads, ended = [], threading.Event()

    def waits(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        # Training begins with the rewards of the first generation.
        if when == "writing" or prompts[0] not in [record["prompt"] for record in data.records(range(4))]:
            threads.append(threading.current_thread())
            assert ended.wait(30)
        return [0.0] * len(completions)

    module = noted()
    module.__class__ = Breaks
    data = addition(reward_funcs=[waits], async_generations=2)
    if when == "writing":
        data = addition(reward_funcs=[waits], reward_overlap=True)
        module.configure_model()
        module._sampler = BreaksOff(module.model)
    with pytest.raises(RuntimeError, match="broken"):
        fit(module, data, max_steps=3)
    ended.set()
    for thread in set(threads):
        thread.join(3)
    assert len(threads) <= 2, "one call under way for each generation"


@pytest.mark.slow
def test_a_reward_that_waits_costs_little_beside_the_writing() -> None:
    """Writing and judging take .2 s per group each, 8 groups: 1.8 s in place of 3.2."""

    class Slow(NativeSampler):
        def sample(self, prompts: Any, num_generations: int, seeds: Any, settings: Any, on_ended: Any = None) -> Any:
            ready = super().sample(prompts, num_generations, seeds, settings)
            for group in range(len(prompts)):
                time.sleep(0.05 * num_generations)
                for row in range(group * num_generations, (group + 1) * num_generations) if on_ended else ():
                    on_ended(row, ready.tokens[row, : ready.length[row]].tolist(), bool(ready.finished[row]))
            return ready

    class Timed(Spy):
        taken = 0.0

        def act(self, *arguments: Any, **options: Any) -> Any:
            self._sampler = Slow(self.model)
            self.began = time.perf_counter()
            return super().act(*arguments, **options)

        def rewards(self, rollout: Any) -> Any:
            Timed.taken = time.perf_counter() - self.began
            return super().rewards(rollout)

    seconds = []
    for overlap in (False, True):
        module = Timed(model_config=TINY, max_completion_length=5, completions_steps=0, lr_scheduler_type="constant")
        data = addition(reward_funcs=[f"{HERE}:slow_reward"], batch_size=32, reward_overlap=overlap)
        fit(module, data, max_steps=1)
        seconds.append(Timed.taken)
    print(f"off {seconds[0]:.2f} s, on {seconds[1]:.2f} s: {seconds[1] / seconds[0]:.2f}")
    assert seconds[1] / seconds[0] < 0.75  # 0.56 on an idle machine
