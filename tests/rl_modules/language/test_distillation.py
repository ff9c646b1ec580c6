"""Distillation through its module: losses by hand, both datamodules, every kind of teacher, exact resume, bad input."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from datamodules import InstructionDataModule, PromptDataModule
from rl_modules import SFT, Distillation
from rl_modules.common.errors import UsageError
from rl_modules.language import scoring
from rl_modules.language.fast import tiled_head
from rl_modules.language.sampling.teacher import ServedTeacher
from tests.rl_modules.language.fake_vllm_server import running_server
from tests.rl_modules.language.test_grpo import TINY, small_tokenizer
from tests.training import assert_equal_checkpoints, fit

LARGER = {**TINY, "hidden_size": 24, "num_hidden_layers": 2}
Parts = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A larger model of sharper distributions."""
    module = SFT(model_config=LARGER, learning_rate=1e-2)
    fit(module, InstructionDataModule("addition", batch_size=8, n_train=8, n_eval=0), max_steps=5)
    with torch.no_grad():
        module.model.get_output_embeddings().weight.mul_(6)
    return str(module.export(tmp_path_factory.mktemp("teacher") / "model"))


def student(teacher: str | None, **arguments: Any) -> Distillation:
    defaults = {"model_config": TINY, "teacher_model_name_or_path": teacher, "max_completion_length": 5,
                "learning_rate": 1e-2, "lr_scheduler_type": "constant", "completions_steps": 0,
                "logging_steps": 1}  # fmt: skip
    return Distillation(**{**defaults, **arguments})


def prompts(**arguments: Any) -> PromptDataModule:
    return PromptDataModule(
        "addition", **{"batch_size": 8, "num_generations": 1, "n_train": 16, "n_eval": 4, "eval_steps": 0, **arguments}
    )


class Watched(Distillation):
    """Keeps batches, losses and gradients of the first steps."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen = [*getattr(self, "seen", []), (batch, loss.detach().clone())]
        return loss


def watched(teacher: str | None, **arguments: Any) -> Watched:
    return Watched(**dict(student(teacher, **arguments).hparams) | {"description": None})


def distributions(module: Any, batch: dict[str, Any], temperature: float = 1.0) -> list[Parts]:
    """log q and log p of each counted token of a generation, by a pass for each row."""
    found = []
    for row in range(len(batch["tokens"])):
        begin, n = int(batch["prompt_length"][row]), int(batch["length"][row])
        text = batch["tokens"][row : row + 1, : begin + n]
        found.append(tuple(
            (model(input_ids=text).logits[0, begin - 1 : -1] / temperature).log_softmax(-1)
            for model in (module.model, module.reference)
        ))  # fmt: skip
    return found  # type: ignore[return-value]


def by_hand(log_q: torch.Tensor, log_p: torch.Tensor, beta: float) -> torch.Tensor:
    q, p = log_q.exp(), log_p.exp()
    m = beta * p + (1 - beta) * q if 0 < beta < 1 else p if beta else q
    if beta == 0:
        return (p * (log_p - log_q)).sum(-1)
    if beta == 1:
        return (q * (log_q - log_p)).sum(-1)
    return (beta * p * (log_p - m.log()) + (1 - beta) * q * (log_q - m.log())).sum(-1)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_the_gradient_is_that_of_the_divergence(
    beta: float, tiled: bool, teacher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the mean over the step's tokens, by one forward pass for each completion, whole or in tiles."""
    if tiled:
        monkeypatch.setitem(scoring.TILED_ABOVE, "cpu", 0)
        monkeypatch.setitem(tiled_head.TILE, "cpu", 200)
    module = watched(teacher, beta=beta, temperature=0.7, learning_rate=0.0, max_grad_norm=None)
    fit(module, prompts(), max_steps=1)
    batch, loss = module.seen[0]
    pairs = distributions(module, batch, 0.7)
    total = torch.cat([by_hand(log_q, log_p.detach(), beta) for log_q, log_p in pairs])
    assert len(total) == int(batch["mask"].sum())
    torch.testing.assert_close(loss, total.mean().detach(), atol=1e-6, rtol=1e-5)
    parameters = list(module.model.parameters())
    expected = torch.autograd.grad(total.mean(), parameters)
    again = torch.autograd.grad(module.completion_loss(batch) / len(total), parameters)
    for ours, theirs in zip(again, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_the_top_k_with_its_tail_bounds_the_whole(teacher: str) -> None:
    losses = {}
    for k, tail in ((0, True), (2, True), (1000, True), (2, False)):
        options = {"loss_add_tail": tail} if k else {}
        module = watched(teacher, beta=0.0, learning_rate=0.0, loss_top_k=k, **options)
        fit(module, prompts(), max_steps=1)
        losses[k, tail] = float(module.seen[0][1])
    assert losses[2, True] < losses[0, True] == losses[1000, True]
    batch = module.seen[0][0]
    expected = []
    for log_q, log_p in distributions(module, batch):
        top = log_p.topk(2).indices
        q, p = (x.gather(-1, top).exp() for x in (log_q, log_p))
        q, p = (x / x.sum(-1, keepdim=True) for x in (q, p))
        expected.append((p * (p / q).log()).sum(-1))
    assert losses[2, False] == pytest.approx(float(torch.cat(expected).mean()), abs=1e-5)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}])
def test_the_policy_gradient_has_the_teachers_log_ratio_per_token(filters: dict[str, Any], teacher: str) -> None:
    module = watched(teacher, distillation_objective="policy_gradient", learning_rate=0.0, **filters)
    fit(module, prompts(num_iterations=2), max_steps=2)
    for batch, loss in module.seen:
        advantage, mask = batch["advantage"], batch["mask"]
        assert (advantage[~mask] == 0).all()
        # The ratio is 1, so that the value is that of the mean advantage.
        assert float(loss) == pytest.approx(-float(advantage[mask].mean()), abs=1e-4)
    if not filters:
        for row, (log_q, log_p) in enumerate(distributions(module, batch)):
            begin, n = int(batch["prompt_length"][row]), int(batch["length"][row])
            chosen = batch["tokens"][row, begin : begin + n, None]
            expected = (log_p - log_q).gather(-1, chosen).squeeze(-1)
            torch.testing.assert_close(advantage[row, :n], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_demonstrations_are_the_other_experience(packing: bool, teacher: str) -> None:
    data = InstructionDataModule("addition", batch_size=8, n_train=16, n_eval=8, packing=packing)
    module = watched(teacher, beta=0.0, learning_rate=0.0)
    fit(module, data, max_steps=1)
    batch, loss = module.seen[0]
    counted, tokens = batch["counted"], batch["tokens"]
    inputs = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    log_q, log_p = (
        model(input_ids=tokens, **inputs).logits.flatten(0, 1)[counted - 1].log_softmax(-1)
        for model in (module.model, module.reference)
    )
    assert float(loss) == pytest.approx(float(by_hand(log_q, log_p, 0.0).mean()), abs=1e-5)


def test_lmbda_weights_both(teacher: str) -> None:
    module = watched(teacher, lmbda=0.3, learning_rate=0.0)
    fit(module, prompts(ptx_batch_size=4), max_steps=1)
    batch, loss = module.seen[0]
    alone = module.completion_loss(batch) / batch["step_tokens"]
    shown, _ = module.divergence(batch["ptx_counted"] - 1, 1.0, input_ids=batch["ptx_tokens"])
    assert float(loss) == pytest.approx(float(0.3 * alone + 0.7 * shown.mean()), abs=1e-5)


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("objective", ["jsd", "policy_gradient"])
def test_a_teacher_reads_padding_where_a_student_of_more_rows_writes_what_it_does_not_know(
    objective: str, top_k: int | None, tmp_path: Path
) -> None:
    tokens = small_tokenizer(tmp_path / "tokens")
    source = SFT(model_config={**TINY, "vocab_size": 3}, tokenizer_name_or_path=tokens)
    source.configure_model()
    teacher = str(source.export(tmp_path / "teacher"))
    module = watched(teacher, model_config={**TINY, "vocab_size": 6}, tokenizer_name_or_path=tokens, top_k=top_k,
                     distillation_objective=objective, max_completion_length=6, learning_rate=0.0)  # fmt: skip
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    fit(module, PromptDataModule(path=str(rows), batch_size=16, num_generations=1, eval_steps=0), max_steps=1)
    [(batch, _)] = module.seen
    text, mask = batch["tokens"], batch["mask"]
    assert bool((text > 2).any())
    log_p = module.reference(input_ids=text.where(text < 3, module.tokenizer.pad_token_id)).logits.log_softmax(-1)
    row, column = mask.nonzero(as_tuple=True)
    place = batch["prompt_length"][row] + column
    log_p, drawn = log_p[row, place - 1], text[row, place]
    if objective == "jsd":
        log_q = module.model(input_ids=text).logits[row, place - 1, :3].log_softmax(-1)
        found = module.divergence_of_completions(batch, mask, 0.5)[0]
        torch.testing.assert_close(found, by_hand(log_q, log_p, 0.5), atol=1e-5, rtol=1e-4)
    else:
        assert bool((drawn < 3).all()) and bool(batch["advantage"].isfinite().all())
        if top_k is None:
            expected = log_p.gather(1, drawn.unsqueeze(1)).squeeze(1) - batch["log_prob"][row, column]
            torch.testing.assert_close(batch["advantage"][row, column], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("objective", ["jsd", "policy_gradient"])
def test_a_student_becomes_an_exact_optimal_teacher(objective: str, tmp_path: Path) -> None:
    """The teacher is a closed form, the optimal policy of rewards with entropy: a language of two letters, of which it
    writes `a` with probability .9; the student reaches it, and the curve shows the distance.
    """
    tokens = small_tokenizer(tmp_path / "tokens")
    config = {**TINY, "vocab_size": 3, "max_position_embeddings": 16}
    source = SFT(model_config=config, tokenizer_name_or_path=tokens)
    source.configure_model()
    folder = source.export(tmp_path / "teacher")
    chances = torch.tensor([0.02, 0.9, 0.08])
    module = student(str(folder), model_config=config, tokenizer_name_or_path=tokens, learning_rate=1e-1,
                     distillation_objective=objective, max_completion_length=6)  # fmt: skip
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    data = PromptDataModule(path=str(rows), batch_size=32, num_generations=1, eval_steps=0)
    teach(module, chances)
    fit(module, data, max_steps=60)
    assert float(module.latest_metrics["train/reverse_kl"]) < 0.02
    with torch.no_grad():
        found = module.model(input_ids=torch.tensor([[1, 2, 1, 1]])).logits.softmax(-1)
    torch.testing.assert_close(found[0, -1], chances, atol=0.1, rtol=0)


def teach(module: Distillation, chances: torch.Tensor) -> None:
    """Replaces the teacher's logits by those of fixed probabilities."""
    original = module.build_model

    def build(config: Any, source: Any) -> None:
        original(config, source)
        head = module.reference.get_output_embeddings()
        head.register_forward_hook(lambda layer, inputs, output: torch.zeros_like(output) + chances.log())

    module.build_model = build  # type: ignore[method-assign]


def test_teachers_of_every_kind(teacher: str, tmp_path: Path) -> None:
    trained = SFT(model_config=LARGER)
    saved = ModelCheckpoint(tmp_path, save_last=True)
    fit(trained, InstructionDataModule("addition", batch_size=8, n_train=8, n_eval=0), max_steps=1, callbacks=[saved],
        enable_checkpointing=True)  # fmt: skip
    module = student(str(tmp_path / "last.ckpt"))
    fit(module, prompts(), max_steps=1)
    for name, weight in trained.model.state_dict().items():
        assert torch.equal(weight, module.reference.state_dict()[name])
    of_adapters = student(None, lora={"r": 2, "target_modules": "all-linear"})
    fit(of_adapters, prompts(), max_steps=1)
    assert of_adapters.reference is None
    assert float(of_adapters.latest_metrics["train/reverse_kl"]) == pytest.approx(0, abs=1e-6)


@contextmanager
def serving(folder: str) -> Iterator[str]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with running_server(model, tokenizer) as (_, address):
        yield address


@pytest.mark.parametrize("tail", [True, False])
def test_a_served_teacher_is_the_local_one(tail: bool, teacher: str) -> None:
    options: dict[str, Any] = {"loss_top_k": 3, "loss_add_tail": tail, "beta": 0.3}
    local = watched(teacher, **options)
    fit(local, prompts(), max_steps=2)
    with serving(teacher) as address:
        served = watched(None, teacher_model_server_url=address, **options)
        fit(served, prompts(eval_steps=1), max_steps=2)
        demonstrations = student(None, teacher_model_server_url=address, loss_top_k=2)
        data = InstructionDataModule("addition", batch_size=8, n_train=16, n_eval=8)
        assert fit(demonstrations, data, max_steps=1).global_step == 1
    for (_, theirs), (_, ours) in zip(local.seen, served.seen, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for theirs, ours in zip(local.model.parameters(), served.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_served_teacher_of_other_tokens_or_none_is_refused(teacher: str, tmp_path: Path) -> None:
    tokens = small_tokenizer(tmp_path / "tokens")
    with serving(teacher) as address:
        other = student(None, teacher_model_server_url=address, loss_top_k=2, tokenizer_name_or_path=tokens,
                        model_config={**TINY, "vocab_size": 3})  # fmt: skip
        with pytest.raises(UsageError, match="has a tokenizer with other tokens than the student's"):
            fit(other, prompts(), max_steps=1)
    gone = student(None, teacher_model_server_url=address, loss_top_k=2)
    with pytest.raises(UsageError, match="teacher_model_server_url: .* does not answer"):
        fit(gone, prompts(), max_steps=1)


@pytest.mark.parametrize("objective", ["jsd", "policy_gradient"])
def test_a_stopped_run_resumes_exactly(objective: str, teacher: str, tmp_path: Path) -> None:
    def run(name: str, ckpt_path: Any = None, max_steps: int = 5) -> Path:
        saved = ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        data = prompts(steps_per_generation=2, num_iterations=2)
        fit(student(teacher, distillation_objective=objective), data, max_steps=max_steps, callbacks=[saved],
            enable_checkpointing=True, ckpt_path=ckpt_path)  # fmt: skip
        return tmp_path / name

    whole, part = run("whole"), run("part", max_steps=3)
    run("resumed", part / "step=3.ckpt")
    assert_equal_checkpoints(whole / "step=5.ckpt", tmp_path / "resumed" / "step=5.ckpt")


def test_evaluations_show_the_distance_to_the_teacher(teacher: str, tmp_path: Path) -> None:
    module = student(teacher)
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(12)))
    data = PromptDataModule(path=str(rows), batch_size=4, num_generations=1, eval_path=str(rows), eval_steps=1)
    fit(module, data, max_steps=1)
    assert module.best_metric == ("eval/reverse_kl", "min")
    assert float(module.trainer.callback_metrics["eval/reverse_kl"]) > 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda t: student(None), "teacher_model_name_or_path=None leaves no teacher without lora"),
        (lambda t: student(None, teacher_model_server_url="a:1"), "takes loss_top_k from 1 to 1024"),
        (lambda t: student(t, beta=1.5), "beta=1.5 must lie in"),
        (lambda t: student(t, distillation_objective="kl"), "distillation_objective='kl' must be one of jsd, policy_"),
        (lambda t: student(t, ref_model_name_or_path="x"), "Distillation sets ref_model_name_or_path itself"),
    ],
)
def test_refused_arguments(make: Any, sentence: str, teacher: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make(teacher)


def test_refused_teachers_and_data(teacher: str, tmp_path: Path) -> None:
    tokens = small_tokenizer(tmp_path / "tokens")
    with pytest.raises(UsageError, match=r"teacher_model_name_or_path=.* has a tokenizer with \d+ tokens in which id"):
        fit(student(teacher, model_config={**TINY, "vocab_size": 3}, tokenizer_name_or_path=tokens), prompts(),
            max_steps=1)  # fmt: skip
    with pytest.raises(UsageError, match="lmbda=0.5 with ptx_batch_size=0"):
        fit(student(teacher, lmbda=0.5), prompts(), max_steps=1)
    data = InstructionDataModule("addition", batch_size=8, n_train=16, n_eval=0)
    with pytest.raises(UsageError, match="needs the student's completions; take PromptDataModule"):
        fit(student(teacher, distillation_objective="policy_gradient"), data, max_steps=1)


def scored(k: int, *places: dict[str, float], last: Any = None) -> dict[str, Any]:
    """An answer about a text whose places but the first and the last have these log-probabilities."""
    rows = [{token: {"logprob": value} for token, value in place.items()} for place in places]
    top = [{"token_id": i, "logprob": -1.0} for i in range(k)] if last is None else last
    return {"prompt_logprobs": [None, *rows], "choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}


LIES: dict[str, Any] = {
    "fewer places": scored(2),
    "more places": scored(2, *[{"1": -1.0, "2": -1.0}] * 2),
    "fewer tokens": scored(2, {"1": -1.0}),
    "a token that no model has": scored(2, {"1": -1.0, "99": -1.0}),
    "a token that is no number": scored(2, {"1": -1.0, "x": -1.0}),
    "probabilities above 1": scored(2, {"1": -0.1, "2": -0.1}),
    "a log-probability of NaN": scored(2, {"1": -1.0, "2": float("nan")}),
    "a log-probability above 0": scored(2, {"1": 2.0, "2": -9.0}),
    "a last token with a fraction": scored(2, {"1": -1.0, "2": -1.0}, last=[{"token_id": 1.5, "logprob": -1.0}] * 2),
    "no places": {"prompt_logprobs": None, "choices": []},
    "a list": [],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_served_teachers_answer_is_checked(lie: str, teacher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ServedTeacher("127.0.0.1:1", student(teacher).tokenizer, 2)
    monkeypatch.setattr(client.server, "ask", lambda *given, **options: {"prompt": client.tokenizer.decode(range(99))})
    truth = scored(2, {"5": -1.0, "6": -2.0, "1": -1.5})
    for answer, refused in ((truth, False), (LIES[lie], True)):
        monkeypatch.setattr(client.server, "ask_all", lambda *given, answer=answer: [answer])
        if refused:
            with pytest.raises(UsageError, match="127.0.0.1:1 answers /inference/v1/generate wrongly: "):
                client.likeliest([[3, 4, 5]], [1], 14)
        else:
            assert client.likeliest([[3, 4, 5]], [1], 14)[0].tolist() == [[5, 1], [0, 1]]
