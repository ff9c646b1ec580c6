"""What belongs to one run starts anew at each fit; what a model brings along survives checkpoints and exports."""

import json
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, OnExceptionCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from transformers import AutoModelForCausalLM, GenerationConfig

from datamodules import InstructionDataModule, PreferenceDataModule, PromptDataModule
from rl_modules.common.arguments import plain
from rl_modules.common.errors import UsageError
from rl_modules.language.dpo import DPO
from rl_modules.language.grpo import GRPO
from rl_modules.language.reward_model import RewardModel
from rl_modules.language.rlhf_ppo import RLHFPPO
from rl_modules.language.sft import SFT
from tests.training import assert_resumes_exactly, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
HERE = "tests.rl_modules.language.test_run_state"


def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [sum(map(ord, text)) % 5 / 4 for text in completions]


def fails_on_even(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    if any(sum(map(ord, text)) % 2 == 0 for text in completions):
        raise RuntimeError("no service")
    return [1.0] * len(completions)


def grpo(**arguments: Any) -> GRPO:
    defaults = {"model_config": TINY, "max_completion_length": 5, "learning_rate": 1e-3, "logging_steps": 2,
                "lr_scheduler_type": "constant", "completions_steps": 0}  # fmt: skip
    return GRPO(**{**defaults, **arguments})


def addition(*funcs: str, **arguments: Any) -> PromptDataModule:
    defaults = {"batch_size": 8, "num_generations": 4, "eval_steps": 0, "n_train": 24,
                "reward_funcs": [f"{HERE}:{name}" for name in funcs or ("reward",)]}  # fmt: skip
    return PromptDataModule("addition", **{**defaults, **arguments})


class Curves(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.points.append((step, metrics))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = RewardModel(model_config=TINY)
    model.configure_model()
    return str(model.export(tmp_path_factory.mktemp("judge")))


# -------------------------------------------------------------------- one run


class Noting(GRPO):
    """Records numbers of every kind, some of them in some updates only."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        self.record(python=1.5, whole=2, numpy=np.float64(0.25), narrow=torch.tensor([3.0], dtype=torch.bfloat16))
        if step % 2:
            self.record(odd=float(step))
        self.record(weight=np.int64(step), by_step=step)
        self.record(0.0, nothing=torch.tensor(torch.nan))
        return super().training_step(batch, batch_idx)


def test_any_number_of_metrics_in_any_subset_of_updates() -> None:
    curves = Curves()
    module = Noting(**{k: v for k, v in grpo().hparams.items() if k != "description"})
    fit(module, addition(), max_steps=4, logger=curves)
    assert [step for step, _ in curves.points] == [2, 4]
    first, second = (
        {name.removeprefix("train/"): value for name, value in point.items()} for _, point in curves.points
    )
    for point in (first, second):
        assert (point["python"], point["whole"], point["numpy"], point["narrow"]) == (1.5, 2.0, 0.25, 3.0)
        assert "nothing" not in point
    assert (first["odd"], second["odd"]) == (1.0, 3.0)
    # Steps 0 and 1, then 2 and 3, each with its own number as weight.
    assert first["by_step"] == 1.0 and second["by_step"] == pytest.approx((4 + 9) / 5)


@pytest.mark.parametrize(("value", "message"), [
    (torch.zeros(3), r"the metric loss has shape \(3,\); record takes scalars"),
    ("high", "could not convert .* 'high'"),
])  # fmt: skip
def test_what_is_no_scalar_is_not_recorded(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo().record(loss=value)


@pytest.mark.long
def test_a_second_fit_counts_from_zero(judge: str) -> None:
    for make in (lambda: grpo(beta=0.1, sync_ref_model=True, ref_model_sync_steps=3),
                 lambda: RLHFPPO(model_config=TINY, max_completion_length=5, learning_rate=1e-3, logging_steps=2,
                                 reward_model_name_or_path=judge, target_kl=1e-4, kl_gain=1.0)):  # fmt: skip
        module, points, tokens = make(), [], []
        beta = module.beta
        for _ in range(2):
            curves = Curves()
            fit(module, addition(num_generations=4), max_steps=4, logger=curves)
            points.append([step for step, _ in curves.points])
            tokens.append([point["train/num_tokens"] for _, point in curves.points])
            if isinstance(module, RLHFPPO):
                assert curves.points[0][1]["train/beta"] < 1.2 * beta and module.beta != beta
        assert points == [[2, 4], [2, 4]]
        assert tokens[1][0] < tokens[0][1], "counted from 0 again"


@pytest.mark.long
def test_a_warm_start_from_a_checkpoint_is_a_new_run(tmp_path: Path) -> None:
    fit(grpo(), addition(), max_steps=3, accumulate_grad_batches=2).save_checkpoint(tmp_path / "first.ckpt")
    module = GRPO.load_from_checkpoint(tmp_path / "first.ckpt", weights_only=True)
    assert module.num_tokens > 0
    curves = Curves()
    fit(module, addition(), max_steps=2, logger=curves)
    assert [step for step, _ in curves.points] == [2]
    assert curves.points[0][1]["train/num_tokens"] == module.num_tokens < 16 * 12 * 2


@pytest.mark.long
@pytest.mark.parametrize("micro", [1, 2])
def test_a_resumed_run_keeps_its_state(micro: int, tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: grpo(logging_steps=3), addition, tmp_path, epochs=3, accumulate_grad_batches=micro)


@pytest.mark.long
@pytest.mark.parametrize("pair", [
    (SFT, lambda: InstructionDataModule("addition", batch_size=8, n_train=16, eval_steps=0)),
    (DPO, lambda: PreferenceDataModule("paths", batch_size=8, n_train=16, eval_steps=0)),
])  # fmt: skip
def test_the_batch_size_that_lightning_finds_is_trained_with(pair: Any, tmp_path: Path) -> None:
    kind, make = pair
    seen: list[int] = []

    class Mine(kind):  # type: ignore[misc]
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            seen.append(len(batch["tokens" if kind is SFT else "index"]))
            return super().training_step(batch, batch_idx)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=2)
    trainer = L.Trainer(
        max_steps=2, accelerator="cpu", default_root_dir=tmp_path, callbacks=[finder], enable_checkpointing=False,
        **quiet,
    )  # fmt: skip
    trainer.fit(Mine(model_config=TINY), datamodule=make())
    assert seen == [2, 4, 4, 4]


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_stochastic_weight_averaging_averages(lora: Any) -> None:
    weights: list[Tensor] = []

    class Watch(L.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            weights.append(parameters_to_vector(module.model.parameters()).detach())

    module = SFT(model_config=TINY, lora=lora, learning_rate=1e-2, lr_scheduler_type="constant")
    data = InstructionDataModule("addition", batch_size=4, n_train=8, eval_steps=0)
    fit(module, data, max_epochs=4, callbacks=[Watch(), StochasticWeightAveraging(1e-2, swa_epoch_start=2)])
    assert not torch.equal(weights[1], weights[3])
    torch.testing.assert_close(parameters_to_vector(module.model.parameters()), torch.stack(weights[1:]).mean(0))


def test_a_wrong_argument_costs_no_checkpoint_of_an_earlier_error(tmp_path: Path) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("stop")

    def run(module: Any, **arguments: Any) -> None:
        callbacks = [OnExceptionCheckpoint(tmp_path), *arguments.pop("callbacks", ())]
        fit(module, addition(), max_steps=3, callbacks=callbacks, enable_checkpointing=True, **arguments)

    with pytest.raises(RuntimeError, match="stop"):
        run(grpo(), callbacks=[L.pytorch.callbacks.LambdaCallback(on_train_batch_end=fails)])
    before = (tmp_path / "on_exception.ckpt").read_bytes()
    for wrong in (grpo(model_name_or_path=str(tmp_path / "nowhere"), model_config=None), grpo(torch_dtype="bfloat16")):
        with pytest.raises(UsageError):
            run(wrong)
        assert (tmp_path / "on_exception.ckpt").read_bytes() == before


def test_a_learning_rate_beside_an_optimizer_is_said_to_have_no_effect(recwarn: pytest.WarningsRecorder) -> None:
    fit(grpo(learning_rate=5e-5, optimizer=torch.optim.Adam), addition(), max_steps=1)
    sentence = ("learning_rate=5e-05 does nothing beside optimizer, which has its own; give it to that, or leave "
                "learning_rate out")  # fmt: skip
    assert [str(w.message) for w in recwarn if "learning_rate" in str(w.message)] == [sentence]
    recwarn.clear()
    fit(grpo(learning_rate=1e-6, optimizer=torch.optim.Adam), addition(), max_steps=1)
    assert not [w for w in recwarn if "learning_rate" in str(w.message)]


def test_a_checkpoint_of_an_idle_reference_loads(tmp_path: Path) -> None:
    fit(grpo(sync_ref_model=True, beta=0.0), addition(), max_steps=1).save_checkpoint(tmp_path / "run.ckpt")
    module = GRPO.load_from_checkpoint(tmp_path / "run.ckpt")
    module.configure_model()
    assert module.reference is None and module.sync_ref_model


def test_unlogged_sums_of_a_checkpoint_follow_the_module_to_its_device() -> None:
    """The meta device stands for a GPU: an operation between it and the CPU raises there too."""
    module = grpo()
    module.configure_model()
    checkpoint: dict[str, Any] = {}
    module.record(loss=1.0, odd=torch.tensor(2.0))
    module._trainer = None
    module.on_save_checkpoint(checkpoint)
    module.on_load_checkpoint(checkpoint)
    module.to("meta")
    module._means.to(module.device)
    module.record(torch.ones((), dtype=torch.float32, device="meta"), loss=1.0)
    module.record(odd=torch.ones((), dtype=torch.float32, device="meta"))
    for rows in module._means._rows.values():
        assert torch.stack(rows).device.type == "meta"


def test_failures_of_a_reward_function_are_counted_and_cost_nothing_else(capsys: pytest.CaptureFixture) -> None:
    curves, seen = Curves(), []

    class Spy(GRPO):
        def prepare(self, rollout: Any) -> Any:
            fields = super().prepare(rollout)
            seen.append((rollout, fields))
            return fields

    module = Spy(**{k: v for k, v in grpo(logging_steps=1).hparams.items() if k != "description"})
    fit(module, addition("reward", "fails_on_even"), max_steps=2, logger=curves)
    for (rollout, fields), (_, point) in zip(seen, curves.points, strict=True):
        failed = [sum(map(ord, text)) % 2 == 0 for text in rollout["texts"]]
        assert 0 < sum(failed) < 8
        assert point["train/rewards/fails_on_even/failed"] == sum(failed) and point["train/rewards/reward/failed"] == 0
        assert rollout["rewards"][:, 1].isnan().tolist() == failed
        assert not rollout["reward"].isnan().any(), "the other function's reward remains"
        assert fields["advantage"].isfinite().all()
    assert capsys.readouterr().out.count("'fails_on_even' raised RuntimeError: no service") == 1


# -------------------------------------------------------------------- what a model brings along


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A model whose generation config names two EOS tokens and its own way of sampling."""
    start = SFT(model_config=TINY)
    start.configure_model()
    eos = [start.tokenizer.eos_token_id, 7]
    start.model.generation_config = GenerationConfig(eos_token_id=eos, do_sample=True, temperature=0.6, top_k=20)
    return start.export(tmp_path / "pretrained")


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj"]}])
def test_the_generation_config_survives_checkpoint_and_export(lora: Any, pretrained: Path, tmp_path: Path) -> None:
    def written(folder: Path) -> tuple[Any, ...]:
        config = json.loads((folder / "generation_config.json").read_text())
        return config["eos_token_id"], config["do_sample"], config["temperature"], config["top_k"]

    expected = written(pretrained)
    assert expected[1:] == (True, 0.6, 20) and expected[0][1] == 7
    module = grpo(model_name_or_path=str(pretrained), model_config=None, lora=lora)
    fit(module, addition(), max_steps=1).save_checkpoint(tmp_path / "end.ckpt")
    assert written(module.export(tmp_path / "exported")) == expected
    if lora is None:  # under LoRA the checkpoint names the frozen weights' directory
        shutil.rmtree(pretrained)
    again = GRPO.load_from_checkpoint(tmp_path / "end.ckpt", weights_only=True)
    assert written(again.export(tmp_path / "again")) == expected
    # Token 7 ends completions of both.
    seeds = list(range(200))
    for model in (module, again):
        completions = model.act([[5, 6]] * 200, seeds, max_completion_length=8)
        ended = {row[n - 1] for row, n in zip(completions.tokens.tolist(), completions.length.tolist(), strict=True)}
        assert 7 in ended and not (completions.tokens[:, :-1][completions.mask[:, 1:]] == 7).any()


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj"]}])
@pytest.mark.parametrize(("own", "stops"), [(7, [1, 7]), ([7, 8], [1, 7, 8]), (None, 1)])
def test_generate_stops_where_an_exports_tokenizer_ends(
    lora: Any, own: Any, stops: Any, pretrained: Path, tmp_path: Path
) -> None:
    """A base model ends texts by another token than the chats that it is trained on."""
    settings = json.loads((pretrained / "generation_config.json").read_text())
    (pretrained / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": own}))
    module = SFT(model_name_or_path=str(pretrained), lora=lora)
    module.configure_model()
    assert module.tokenizer.eos_token_id == 1
    exported = AutoModelForCausalLM.from_pretrained(module.export(tmp_path / "exported"))
    assert exported.generation_config.eos_token_id == stops
    texts = exported.generate(torch.full((300, 1), 5), max_new_tokens=6, top_k=0, temperature=1.0, pad_token_id=0)
    ended = texts[:, 1:-1] == 1
    assert ended.any() and not texts[:, 2:][ended].any(), "padding follows"


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj"]}])
@pytest.mark.parametrize("as_object", [False, True])
def test_settings_that_a_generation_config_cannot_use_cost_no_export(
    lora: Any, as_object: bool, pretrained: Path, tmp_path: Path
) -> None:
    """transformers reads a published config with a temperature and do_sample=false, but refuses to write it."""
    published = json.loads((pretrained / "generation_config.json").read_text())
    published |= {"do_sample": False, "top_p": 0.9, "early_stopping": True, "repetition_penalty": 1.1}
    (pretrained / "generation_config.json").write_text(json.dumps(published))
    source: Any = AutoModelForCausalLM.from_pretrained(pretrained) if as_object else str(pretrained)
    module = grpo(model_name_or_path=source, model_config=None, lora=lora)
    said = "temperature=0.6.*do_sample=False.*num_beams=None; exports leave"
    with pytest.warns(UserWarning, match=said):
        trainer = fit(module, addition(), max_steps=1)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    for exporter in (module, GRPO.load_from_checkpoint(tmp_path / "end.ckpt", weights_only=True)):
        folder = exporter.export(tmp_path / "exported")
        written = AutoModelForCausalLM.from_pretrained(folder).generation_config
        written.validate(strict=True)
        assert written.eos_token_id == published["eos_token_id"] and written.repetition_penalty == 1.1
        dropped = (written.temperature, written.top_k, written.top_p, written.early_stopping)
        assert dropped == (None,) * 4 and written.do_sample is False


def test_reinforcement_learning_turns_the_adapters_dropout_off(judge: str) -> None:
    lora = {"r": 4, "lora_dropout": 0.5, "target_modules": "all-linear", "init_lora_weights": False}

    def forward(model: Any) -> list[Tensor]:
        tokens = torch.tensor([[5, 6, 7, 8]])
        return [model(input_ids=tokens).logits.detach() for _ in range(2)]

    for module in (grpo(lora=lora), RLHFPPO(model_config=TINY, reward_model_name_or_path=judge, lora=lora)):
        module.configure_model()
        module.model.train()  # as at the start of a fit
        for model in [module.model] + ([module.value_model] if isinstance(module, RLHFPPO) else []):
            one, other = forward(model)
            assert torch.equal(one, other)
    supervised = SFT(model_config=TINY, lora=lora)
    supervised.configure_model()
    supervised.model.train()
    one, other = forward(supervised.model)
    assert not torch.equal(one, other), "supervised training keeps it"


# -------------------------------------------------------------------- hyperparameters


def test_numbers_of_numpy_and_torch_make_checkpoints_that_load(tmp_path: Path) -> None:
    module = grpo(beta=np.float64(0.1), epsilon=np.float32(0.25), max_completion_length=np.int64(4),
                  learning_rate=np.float64(1e-3), reward_weights=list(np.array([0.5])),
                  lora={"r": np.int64(2), "target_modules": ("q_proj",)})  # fmt: skip
    data = addition(batch_size=np.int64(8), num_generations=np.int32(4), n_train=np.int64(16), seed=np.int64(3))
    trainer = fit(module, data, max_steps=2)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["beta"] == 0.1 and saved["hyper_parameters"]["lora"]["r"] == 2
    assert saved["datamodule_hyper_parameters"]["batch_size"] == 8
    assert GRPO.load_from_checkpoint(tmp_path / "end.ckpt", weights_only=True).hparams["max_completion_length"] == 4
    fit(module, data, ckpt_path=tmp_path / "end.ckpt", max_steps=3)


def test_an_adaptive_price_in_numpy_is_a_number_in_the_checkpoint(judge: str, tmp_path: Path) -> None:
    module = RLHFPPO(model_config=TINY, max_completion_length=4, reward_model_name_or_path=judge,
                     beta=np.float32(0.25), target_kl=np.float64(1.0))  # fmt: skip
    fit(module, addition(num_generations=1), max_steps=1).save_checkpoint(tmp_path / "end.ckpt")
    assert type(torch.load(tmp_path / "end.ckpt", weights_only=True)["run"]["beta"]) is float


def test_plain_values() -> None:
    value = {"a": np.int64(1), "b": [np.float32(0.5), (np.bool_(True), "x")], "c": np.arange(2), "d": Path("p"),
             "e": torch.tensor(2), "f": None}  # fmt: skip
    assert plain(value) == {"a": 1, "b": [0.5, (True, "x")], "c": [0, 1], "d": "p", "e": 2, "f": None}
    assert type(plain(np.float64(0.1))) is float and type(plain(np.int32(1))) is int


def test_new_weights_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    grpo().configure_model()
    assert torch.equal(torch.rand(3), expected)


def test_the_generator_of_the_strategys_device_is_put_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[Any] = []
    inner = torch.random.fork_rng

    def noting(devices: Any = None, **options: Any) -> Any:
        forked.append((list(devices), options.get("device_type")))
        return inner(devices=[])

    monkeypatch.setattr(torch.random, "fork_rng", noting)
    module = grpo()
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module._trainer = trainer
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda", 1))
    module.configure_model()
    assert forked[0] == ([torch.device("cuda", 1)], "cuda")  # the others are of self-checks
