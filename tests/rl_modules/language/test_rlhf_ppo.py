"""RLHF with PPO: against hand-made tables, enumerated optima, Transformers' own forward passes, and itself cut up."""

import itertools
import json
import math
import shutil
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from datamodules.language.prompt import PromptDataModule
from rl_modules.common.errors import UsageError
from rl_modules.language.architecture import make_config
from rl_modules.language.critics import token_values
from rl_modules.language.export import export_model
from rl_modules.language.fast.early_gradient import loss_of
from rl_modules.language.models import make_model
from rl_modules.language.reward_model import RewardModel
from rl_modules.language.rlhf_ppo import RLHFPPO
from rl_modules.language.scoring import completion_log_probs
from tests.conformance.architectures import ARCHITECTURES
from tests.ranks import on_ranks
from tests.training import assert_equal_checkpoints, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.1,
        "tie_word_embeddings": False}  # fmt: skip
ALPHABET = "abcdefghijk:"
PROMPTS = ["ab:", "c:", "defg:", "hi:", "jk:"]


def letters(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a few letters: what a policy over them can say can be listed."""
    special = ["<pad>", "<eos>", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*special, *alphabet])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                                   clean_up_tokenization_spaces=False)  # fmt: skip


def export(folder: Any, head: str, seed: int, tokenizer: Any = None, **config: Any) -> str:
    """A small random model as a Hugging Face directory."""
    tokenizer = tokenizer or letters(ALPHABET)
    torch.manual_seed(seed)
    model = make_model(make_config(None, {**TINY, **config}, tokenizer, dropout=True), head=head)
    return str(export_model(model, tokenizer, folder))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, a reward model, and prompts of several lengths."""
    root = tmp_path_factory.mktemp("rlhf")
    export(root / "policy", "causal", 0)
    export(root / "reward", "score", 1)
    rows = [{"prompt": p, "answer": p[0], "completion": p[::-1]} for p in PROMPTS]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def make(folders):
    """A module and its datamodule; keyword arguments go to whichever has them."""

    def make(cls: type[RLHFPPO] = RLHFPPO, data: dict[str, Any] | None = None, **model: Any) -> tuple[Any, Any]:
        settings = {"model_name_or_path": str(folders / "policy"),
                    "reward_model_name_or_path": str(folders / "reward"), "max_completion_length": 6,
                    "learning_rate": 1e-3, "lr_scheduler_type": "constant", "logging_steps": 1}  # fmt: skip
        prompts = {"path": str(folders / "prompts.jsonl"), "num_generations": 1, "batch_size": 8, "n_eval": 0,
                   "reward_funcs": ["exact_answer"]}  # fmt: skip
        return cls(**{**settings, **model}), PromptDataModule(**{**prompts, **(data or {})})

    return make


class Curves(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, dict[str, float]]] = []

    name, version = "curves", 0  # type: ignore[assignment]

    def log_metrics(self, metrics, step=None):
        self.points.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass


class Watch(L.Callback):
    """Keeps each minibatch."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append({**batch, "step": trainer.global_step})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def weights(module: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])


def bare(**arguments: Any) -> RLHFPPO:
    return RLHFPPO(reward_model_name_or_path="unread", **arguments)


# -------------------------------------------------------------------- rewards and advantages


def test_advantages_against_a_hand_worked_table_with_ragged_lengths():
    module = bare(gamma=1.0, lam=0.5)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
    reward = torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0], [1.0, -1.0, 0.0]])
    # What stands behind a completion's end must not be read.
    value = torch.tensor([[0.5, 0.25, 0.5], [0.5, 7.0, 7.0], [0.0, 1.0, 7.0]])
    # Row 0: δ = (.25-.5, .5-.25, 1-.5); A_2 = .5, A_1 = .25+.5·.5, A_0 = -.25+.5·.5. Row 2: δ = (1+1-0, -1-1).
    expected = torch.tensor([[0.0, 0.5, 0.5], [1.5, 0.0, 0.0], [1.0, -2.0, 0.0]])
    torch.testing.assert_close(module.advantages(reward, value, mask), expected)
    discounted = bare(gamma=0.5, lam=1.0).advantages(reward, value, mask)
    # λ = 1: the discounted sum of rewards, less the value. Row 0: (1/4, 1/2, 1) - V.
    torch.testing.assert_close(discounted[0], torch.tensor([-0.25, 0.25, 0.5]))
    torch.testing.assert_close(discounted[2], torch.tensor([0.5, -2.0, 0.0]))


def test_token_rewards_against_a_hand_worked_table():
    log_prob = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, 0.0, 0.0]])
    ref_log_prob = torch.tensor([[-2.0, -2.0, -1.0], [-1.5, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    rollout = {"reward": torch.tensor([10.0, 20.0]), "log_prob": log_prob, "ref_log_prob": ref_log_prob, "mask": mask}
    k1 = torch.tensor([[-0.1, 0.0, 10.2], [19.95, 0.0, 0.0]])
    torch.testing.assert_close(bare(beta=0.1).token_rewards(rollout), k1)
    # k3 = exp(d) - 1 - d with d = log π_ref - log π: d = -1, 0, 2 and -1/2.
    k3 = torch.tensor([[-0.1 / math.e, 0.0, 10 - 0.1 * (math.e**2 - 3)], [20 - 0.1 * (math.exp(-0.5) - 0.5), 0, 0]])
    torch.testing.assert_close(bare(beta=0.1, kl_estimator="k3").token_rewards(rollout), k3)


def test_whitened_rewards_keep_their_mean_and_have_unit_variance(make):
    module, _ = make(whiten_rewards=True, beta=0.1)
    module._trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    rollout = {"reward": torch.tensor([3.0, -1.0]), "log_prob": torch.randn(2, 3), "ref_log_prob": torch.randn(2, 3),
               "mask": mask}  # fmt: skip
    plain = bare(beta=0.1).token_rewards(rollout)[mask]
    whitened = module.token_rewards(rollout)[mask]
    torch.testing.assert_close(whitened.mean(), plain.mean())
    torch.testing.assert_close(whitened.std(), torch.tensor(1.0))
    assert torch.corrcoef(torch.stack([whitened, plain]))[0, 1] > 0.9999


def test_a_completion_without_end_pays_the_penalty_and_scores_are_those_of_the_reward_model(make, folders):
    seen: dict[str, Any] = {}
    rewards = RLHFPPO.rewards

    class Spy(RLHFPPO):
        def rewards(self, rollout):
            seen.update(rollout, reward=rewards(self, rollout))
            return seen["reward"]

    module, data = make(Spy, missing_eos_penalty=2.5, local_rollout_forward_batch_size=3)
    fit(module, data, max_steps=1)
    judge = AutoModelForSequenceClassification.from_pretrained(folders / "reward").eval()
    assert 0 < seen["finished"].sum() < 8, "the test needs completions with and without an end"
    for i in range(8):
        total = int(seen["prompt_length"][i] + seen["length"][i])
        states = judge.model(seen["tokens"][i : i + 1, :total]).last_hidden_state
        expected = judge.score(states)[0, -1, 0] - (0.0 if seen["finished"][i] else 2.5)
        torch.testing.assert_close(seen["reward"][i], expected, atol=1e-5, rtol=1e-5)


def test_unscored_completions_count_in_no_loss(make):
    class Picky(RLHFPPO):
        def rewards(self, rollout):
            reward = super().rewards(rollout)
            reward[::2] = torch.nan
            return reward

    watch = Watch()
    module, data = make(Picky)
    fit(module, data, max_steps=1, callbacks=[watch])
    batch = watch.batches[0]
    assert batch["mask"].any(1).sum() == 4
    assert batch["step_tokens"] == batch["mask"].sum()
    assert all(batch[name].isfinite().all() for name in ("advantage", "returns"))
    assert weights(module).isfinite().all()


class Particular(RLHFPPO):
    """Scores completions by their first token, some of them only; keeps scores and KL of the generations."""

    applies: float = 0.6  # share of tokens that it scores

    def rewards(self, rollout):
        first = rollout["tokens"].gather(1, rollout["prompt_length"].unsqueeze(1)).squeeze(1).float()
        self.scores = torch.where(first % 10 < 10 * self.applies, first - 50, torch.nan)
        return self.scores.clone()

    def record_generation(self, rollout, returns):
        self.distances = [
            float((ours[:n] - theirs[:n]).sum())
            for ours, theirs, n in zip(rollout["log_prob"], rollout["ref_log_prob"], rollout["length"], strict=True)
        ]
        super().record_generation(rollout, returns)

    def write_completions(self, rollout, score, kl):
        self.written = score


def test_objectives_are_means_over_the_scored_completions(make):
    module, data = make(Particular, beta=0.3, learning_rate=0.1, completions_steps=1)
    fit(module, data, max_steps=2)
    scores = module.scores.tolist()
    scored = [i for i, score in enumerate(scores) if score == score]
    assert 0 < len(scored) < 8, "the test needs completions of both kinds"
    metrics = module.latest_metrics
    mean, kl = (sum(x[i] for i in scored) / len(scored) for x in (scores, module.distances))
    assert metrics["train/objective/scores"] == pytest.approx(mean, rel=1e-5)
    assert metrics["train/objective/kl"] == pytest.approx(kl, rel=1e-4) and abs(kl) > 1e-3
    assert metrics["train/objective/rlhf_reward"] == pytest.approx(mean - 0.3 * kl, rel=1e-4)
    torch.testing.assert_close(module.written, module.scores, equal_nan=True)


def test_a_generation_without_scores_has_no_objective_and_leaves_beta_alone(make):
    module, data = make(Particular, beta=0.3, target_kl=0.01)
    module.applies = 0.0
    fit(module, data, max_steps=1)
    assert module.beta == 0.3 and not [name for name in module.latest_metrics if "objective" in name]
    assert "train/completions/mean_length" in module.latest_metrics


# -------------------------------------------------------------------- log-probabilities, ratios, padding


def test_stored_log_probs_and_values_are_those_of_each_unpadded_sequence(make, folders):
    """Also with a filter in sampling, among whose tokens π is, and with dropout in the directory's config."""
    export(folders / "dropping", "causal", 3, attention_dropout=0.5)
    policy = AutoModelForCausalLM.from_pretrained(folders / "dropping").eval()
    judge = AutoModelForSequenceClassification.from_pretrained(folders / "reward").eval()
    watch = Watch()
    module, data = make(
        data={"batch_size": 24}, model_name_or_path=str(folders / "dropping"), temperature=0.7, top_k=10,
        local_rollout_forward_batch_size=5,
    )  # fmt: skip
    fit(module, data, max_steps=1, callbacks=[watch])
    batch = watch.batches[0]
    assert len(set(batch["prompt_length"].tolist())) > 1 and len(set(batch["length"].tolist())) > 1
    with torch.no_grad():
        for i in range(24):
            p, n = int(batch["prompt_length"][i]), int(batch["length"][i])
            tokens = batch["tokens"][i : i + 1, : p + n]
            logits = policy(tokens).logits[0, p - 1 : -1] / 0.7
            logits = logits.masked_fill(logits < logits.topk(10).values[:, -1:], -torch.inf)
            log_prob = torch.distributions.Categorical(logits=logits).log_prob(tokens[0, p:])
            torch.testing.assert_close(batch["log_prob"][i, :n], log_prob, atol=1e-5, rtol=1e-5)
            values = judge.score(judge.model(tokens).last_hidden_state)[0, p - 1 : -1, 0]
            torch.testing.assert_close(batch["value"][i, :n], values, atol=1e-5, rtol=1e-5)
            assert (batch["value"][i, n:] == 0).all() and (batch["advantage"][i, n:] == 0).all()


@pytest.mark.parametrize("lora", [None, {"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
@pytest.mark.parametrize("architecture", ["OPT", "GPT-2"])
def test_the_head_on_the_policy_reads_what_its_output_layer_reads(architecture, lora):
    """OPT's own forward pass skips its body's, and its last states are narrower than the others."""
    config = ARCHITECTURES[architecture] | ({"word_embed_proj_dim": 8} if architecture == "OPT" else {})
    lora = lora and {"r": 2, "target_modules": ["q_proj" if architecture == "OPT" else "c_attn"], **lora}
    module = RLHFPPO(model_config=config, value_head_on_policy=True, lora=lora)
    module.configure_model()
    torch.nn.init.normal_(module.value_head.linear.weight)
    tokens, read = torch.tensor([[5, 6, 7, 8, 9]]), []
    module.model.get_output_embeddings().register_forward_pre_hook(lambda layer, inputs: read.append(inputs[0]))
    module.eval().model(input_ids=tokens)
    _, value, _ = module.policy_and_value(tokens, torch.tensor([2]), torch.tensor([3]))
    torch.testing.assert_close(value, module.value_head.linear(read[0])[:, 1:4, 0])
    assert value.abs().min() > 0


@pytest.mark.parametrize(
    "model", [{}, {"value_head_on_policy": True}, {"lora": {"r": 2, "target_modules": "all-linear"}}]
)
def test_first_minibatch_has_ratio_one_and_later_ones_another(make, folders, model):
    export(folders / "dropping", "causal", 3, attention_dropout=0.5)
    ratios = []

    class Spy(RLHFPPO):
        def training_step(self, batch, batch_idx):
            log_prob, _, _ = self.policy_and_value(batch["tokens"], batch["prompt_length"], batch["length"])
            ratios.append((batch["on_policy"], (log_prob - batch["log_prob"])[batch["mask"]].abs().max().item()))
            return super().training_step(batch, batch_idx)

    curves = Curves()
    module, data = make(
        Spy, {"num_iterations": 2}, model_name_or_path=str(folders / "dropping"), temperature=0.7, **model
    )
    fit(module, data, max_steps=4, logger=curves, log_every_n_steps=1)
    assert [on_policy for on_policy, _ in ratios] == [True, False, True, False]
    assert max(ratios[0][1], ratios[2][1]) <= 1e-6 < min(ratios[1][1], ratios[3][1])
    points = [metrics for _, metrics in curves.points if "train/val/ratio" in metrics]
    assert points[0]["train/val/ratio"] == 1.0 and points[0]["train/policy/approxkl_avg"] == 0.0
    assert points[1]["train/val/ratio"] != 1.0 and points[1]["train/policy/approxkl_avg"] > 0.0


def test_padding_and_the_size_of_forward_passes_change_nothing(make):
    """The losses' gradients of ragged rows together equal those of each row alone, whatever the padding holds."""
    watch = Watch()
    module, data = make()
    fit(module, data, max_steps=1, callbacks=[watch])
    batch = {k: v for k, v in watch.batches[0].items() if k != "step"}

    def gradient(parts):
        module.zero_grad()
        for part in parts:
            module.training_step(part, 0).backward()
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    rows = [
        name for name in batch if isinstance(batch[name], torch.Tensor) and batch[name].ndim and len(batch[name]) == 8
    ]
    together = gradient([batch])
    noisy = {**batch, "tokens": batch["tokens"].clone()}
    total = batch["prompt_length"] + batch["length"]
    noisy["tokens"][torch.arange(batch["tokens"].shape[1]) >= total.unsqueeze(1)] = 7
    torch.testing.assert_close(gradient([noisy]), together)
    alone = []
    for i in range(8):
        n, width = int(batch["length"][i]), int(total[i])
        part = {name: batch[name][i : i + 1] for name in rows}
        part = {k: v[:, :width] if k == "tokens" else v[:, :n] if v.ndim == 2 else v for k, v in part.items()}
        alone.append({**batch, **part})
    torch.testing.assert_close(gradient(alone), together, atol=1e-6, rtol=1e-4)
    assert together.abs().sum() > 0


@pytest.mark.parametrize("model", [{}, {"value_head_on_policy": True}])
def test_micro_batches_make_the_same_step(make, model):
    """Four micro-batches, rows of different lengths, demonstrations beside them: one times eight is four times two."""
    results = []
    for micro in (1, 4):
        module, data = make(data={"num_iterations": 2, "ptx_batch_size": 6}, ptx_coef=0.5, optimizer=sgd, **model)
        fit(module, data, max_steps=4, accumulate_grad_batches=micro)
        results.append(weights(module))
    start, _ = make(**model)
    start.configure_model()
    assert (results[0] - weights(start)).abs().max() > 1e-3
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


def test_an_own_policy_and_value_is_asked_in_training_too(make):
    """Values doubled there train the weights that values doubled by the value model's own method do."""

    class OfBoth(RLHFPPO):
        def policy_and_value(self, *text, **arguments):
            log_prob, value, spread = super().policy_and_value(*text, **arguments)
            return log_prob, 2 * value, spread

    class OfValues(RLHFPPO):
        def values(self, *text):
            return 2 * super().values(*text)

    trained = []
    for cls in (OfBoth, OfValues, RLHFPPO):
        module, data = make(cls, vf_coef=1.0, optimizer=sgd)
        fit(module, data, max_steps=2)
        trained.append(weights(module))
    torch.testing.assert_close(trained[0], trained[1])
    assert not torch.allclose(trained[0], trained[2], atol=1e-3)


@pytest.mark.fast_path
def test_a_gradient_hook_of_a_value_model_runs_once():
    layer, x = torch.nn.Linear(3, 1), torch.randn(4, 3)
    layer.weight.register_hook(lambda gradient: 0.5 * gradient)
    loss_of(layer, lambda: layer(x), lambda value: value.square().mean(), torch.tensor(0.1))[0].backward()
    taken, layer.weight.grad = layer.weight.grad, None
    (0.1 * layer(x).square().mean()).backward()
    torch.testing.assert_close(taken, layer.weight.grad)


@pytest.mark.fast_path
@pytest.mark.parametrize(
    ("model", "trainer"),
    [({}, {}), ({"lora": {"r": 2, "target_modules": "all-linear"}}, {}), ({"gradient_checkpointing": True}, {}),
     ({}, {"precision": "bf16-mixed"}), ({}, {"accumulate_grad_batches": 3})],
)  # fmt: skip
def test_the_value_models_gradient_is_taken_before_the_policys_pass_and_is_that_of_one_backward_pass(
    make, monkeypatch, model, trainer
):
    def trained(fast: bool) -> tuple[torch.Tensor, list[str]]:
        monkeypatch.setattr("rl_modules.language.fast.early_gradient.is_fast", lambda: fast)
        events: list[str] = []

        class Spy(RLHFPPO):
            def on_train_start(self):
                self.model.register_forward_hook(lambda *_: events.append("policy"))
                self.value_model.score.register_full_backward_hook(lambda *_: events.append("value"))

            def training_step(self, batch, batch_idx):
                events.clear()
                return super().training_step(batch, batch_idx)

        module, data = make(Spy, {"num_iterations": 2, "batch_size": 6}, vf_coef=0.3, optimizer=sgd, **model)
        fit(module, data, max_steps=3, **trainer)
        return weights(module), events

    (early, order), (late, other) = trained(True), trained(False)
    assert order == ["value", "policy"] and other == ["policy", "value"]
    torch.testing.assert_close(early, late, atol=1e-7, rtol=1e-6)


def test_a_value_loss_with_a_parameter_of_its_own_trains_it(make):
    class Scaled(RLHFPPO):
        def build_model(self, config, source):
            super().build_model(config, source)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def value_loss(self, value, batch):
            return super().value_loss(value * self.scale, batch)

    module, data = make(Scaled, cliprange_value=None, optimizer=sgd)
    fit(module, data, max_steps=2)
    assert module.scale.item() != 1.0


# -------------------------------------------------------------------- models beside the policy


def test_value_model_starts_as_the_reward_model_measured_from_the_same_zero(make, tmp_path, folders):
    shutil.copytree(folders / "reward", tmp_path / "reward")
    config = json.loads((tmp_path / "reward/config.json").read_text())
    (tmp_path / "reward/config.json").write_text(json.dumps({**config, "reward_offset": 0.75}))
    module, _ = make(reward_model_name_or_path=str(tmp_path / "reward"))
    module.configure_model()
    for name, parameter in module.value_model.named_parameters():
        assert torch.equal(parameter, module.reward_model.get_parameter(name)), name
        assert parameter.requires_grad and not module.reward_model.get_parameter(name).requires_grad
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    prompt_length, length = torch.tensor([2]), torch.tensor([3])
    _, value, _ = module.policy_and_value(tokens, prompt_length, length)
    # V before a token is the reward of the text up to there.
    prefixes = [module.scores(tokens[:, :n], prompt_length, torch.tensor([n - 2]))[0] for n in (2, 3, 4)]
    torch.testing.assert_close(value[0], torch.stack(prefixes))
    raw = token_values(module.reward_model, tokens, prompt_length, length)
    torch.testing.assert_close(value, raw - 0.75)


def test_only_policy_and_value_learn(make):
    module, data = make(data={"num_iterations": 2})
    module.configure_model()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fit(module, data, max_steps=2)
    moved = {name.split(".")[0] for name, x in module.state_dict().items() if not torch.equal(x, before[name])}
    assert moved == {"model", "value_model"}
    module.train()
    assert not module.reference.training and not module.reward_model.training and module.model.training


def test_lora_refers_to_the_policy_without_adapters(make, folders):
    lora = {"r": 2, "target_modules": "all-linear"}
    module, data = make(lora=lora, learning_rate=0.05)
    fit(module, data, max_steps=3)
    assert module.reference is None
    trainable = {n for n, p in module.named_parameters() if p.requires_grad}
    assert all("lora_" in n or (n.startswith("value_model.") and "score" in n) for n in trainable)
    assert any(n.startswith("model.") for n in trainable)
    tokens = torch.tensor([[5, 6, 7, 8]])
    text = (tokens, torch.tensor([2]), torch.tensor([2]))
    start = AutoModelForCausalLM.from_pretrained(folders / "policy").eval()
    with torch.no_grad():
        now, _ = completion_log_probs(module.model, *text)
        with module.reference_model() as reference:
            then, _ = completion_log_probs(reference, *text)
        expected, _ = completion_log_probs(start, *text)
    torch.testing.assert_close(then, expected)
    assert (now - then).abs().max() > 1e-3


def test_a_reference_of_its_own(make, folders):
    export(folders / "other", "causal", 7, hidden_size=32)
    module, _ = make(ref_model_name_or_path=str(folders / "other"))
    module.configure_model()
    text = (torch.tensor([[5, 6, 7, 8]]), torch.tensor([2]), torch.tensor([2]))
    other = AutoModelForCausalLM.from_pretrained(folders / "other").eval()
    with torch.no_grad():
        passes = module.evaluate_completions(*text)
        torch.testing.assert_close(passes["ref_log_prob"], completion_log_probs(other, *text)[0])


def test_reward_model_from_a_lightning_checkpoint(make, make_trainer, tmp_path, folders):
    judge = RewardModel(str(folders / "reward"))
    trainer = make_trainer()
    trainer.strategy.connect(judge)
    judge.configure_model()
    judge.reward_offset = 0.5
    trainer.save_checkpoint(tmp_path / "reward.ckpt")
    module, _ = make(reward_model_name_or_path=str(tmp_path / "reward.ckpt"))
    module.configure_model()
    plain, _ = make()
    plain.configure_model()
    text = (torch.tensor([[5, 6, 7, 8]]), torch.tensor([2]), torch.tensor([2]))
    torch.testing.assert_close(module.scores(*text), plain.scores(*text) - 0.5)


# -------------------------------------------------------------------- demonstrations


def test_ptx_is_the_demonstrations_cross_entropy_per_token(make, folders):
    """Every step sees its demonstrations once over its micro-batches; each pass over the file shows all of them."""
    watch, curves = Watch(), Curves()
    module, data = make(data={"ptx_batch_size": 5}, ptx_coef=2.0, learning_rate=0.0)
    fit(module, data, max_steps=2, callbacks=[watch], logger=curves, log_every_n_steps=1)
    assert module.ptx_coef == 2.0
    policy = AutoModelForCausalLM.from_pretrained(folders / "policy").eval()
    tokenizer = letters(ALPHABET)
    total, count = 0.0, 0
    for prompt in PROMPTS:
        p, c = tokenizer(prompt).input_ids, [*tokenizer(prompt[::-1]).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            logits = policy(torch.tensor([p + c])).logits[0, len(p) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(c), reduction="sum").item()
        count += len(c)
    for _, point in curves.points[:2]:
        assert point["train/loss/ptx_avg"] == pytest.approx(total / count, rel=1e-5)
    assert watch.batches[0]["ptx_step_tokens"] == count


def test_ptx_needs_both_sides(make):
    with pytest.raises(UsageError, match=r"^ptx_coef=1.0 needs demonstrations"):
        fit(*make(ptx_coef=1.0), max_steps=1)
    with pytest.raises(UsageError, match=r"^ptx_batch_size brings demonstrations, but ptx_coef=0"):
        fit(*make(data={"ptx_batch_size": 4}), max_steps=1)


# -------------------------------------------------------------------- the price of the KL


def test_beta_follows_the_kl_and_is_in_the_checkpoint(make, tmp_path):
    module, data = make(beta=0.2, target_kl=5.0)
    curves = Curves()
    trainer = fit(module, data, max_steps=3, logger=curves, log_every_n_steps=1)
    # The KL is far below the target, so that β falls by the controller's largest step of 2 % after each generation.
    betas = [metrics["train/beta"] for _, metrics in curves.points if "train/beta" in metrics]
    assert betas == pytest.approx([0.2, 0.2 * 0.98, 0.2 * 0.98**2], rel=1e-5)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = RLHFPPO.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert loaded.beta == pytest.approx(0.2 * 0.98**3)
    held, data = make(beta=0.2)
    fit(held, data, max_steps=3)
    assert held.beta == 0.2


class WithItsPrice(RLHFPPO):
    """Sets β by itself, which then is no argument."""

    def __init__(self, **arguments):
        super().__init__(beta=0.2, target_kl=5.0, **arguments)


def test_an_adapted_beta_of_a_subclass_is_kept(make, tmp_path):
    module, data = make(WithItsPrice)
    fit(module, data, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    resumed, data = make(WithItsPrice)
    curves = Curves()
    fit(resumed, data, max_steps=2, logger=curves, log_every_n_steps=1, ckpt_path=tmp_path / "last.ckpt")
    betas = [metrics["train/beta"] for _, metrics in curves.points if "train/beta" in metrics]
    assert module.beta != 0.2 and betas == pytest.approx([module.beta])
    assert WithItsPrice.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True).beta == module.beta


def test_another_beta_holds_for_a_run_that_resumes(make, tmp_path):
    fit(*make(beta=0.2), max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    curves = Curves()
    module, data = make(beta=0.9)
    fit(module, data, max_steps=2, logger=curves, log_every_n_steps=1, ckpt_path=tmp_path / "last.ckpt")
    assert [metrics["train/beta"] for _, metrics in curves.points if "train/beta" in metrics] == pytest.approx([0.9])


# -------------------------------------------------------------------- the optimum


def every_completion(words: int, longest: int, eos: int = 1) -> list[list[int]]:
    found = []
    for n in range(1, longest + 1):
        for tokens in itertools.product(range(words), repeat=n):
            if eos not in tokens[:-1] and (tokens[-1] == eos or n == longest):
                found.append(list(tokens))
    return found


def distribution(model: Any, prompt: list[int], completions: list[list[int]], temperature: float) -> torch.Tensor:
    """The probability of every completion, by teacher forcing."""
    longest = max(map(len, completions))
    tokens = torch.tensor([prompt + c + [0] * (longest - len(c)) for c in completions])
    prompt_length = torch.full((len(tokens),), len(prompt))
    length = torch.tensor([len(c) for c in completions])
    with torch.no_grad():
        return completion_log_probs(model, tokens, prompt_length, length, temperature)[0].sum(1).exp()


def learned_and_optimal(folder, alphabet, longest, score, steps, beta, temperature, batch_size, config):
    """Train on one prompt, and compare with π* ∝ π_ref·exp(r/β) over everything that can be said."""
    tokenizer = letters(alphabet)
    tokenizer.save_pretrained(folder / "tokenizer")
    config = {**TINY, **config}
    export(folder / "reward", "score", 1, tokenizer, **config)
    (folder / "prompt.jsonl").write_text((json.dumps({"prompt": alphabet[0]}) + "\n") * 997)

    class Scored(RLHFPPO):
        def rewards(self, rollout):
            return torch.tensor([score(t, bool(f)) for t, f in zip(rollout["texts"], rollout["finished"], strict=True)])

    module = Scored(
        reward_model_name_or_path=str(folder / "reward"), tokenizer_name_or_path=str(folder / "tokenizer"),
        model_config=config, max_completion_length=longest, beta=beta, temperature=temperature,
        whiten_advantages=False, cliprange_value=None, vf_coef=0.5, learning_rate=1e-2,
        local_rollout_forward_batch_size=2048,
    )  # fmt: skip
    data = PromptDataModule(path=str(folder / "prompt.jsonl"), num_generations=1, batch_size=batch_size,
                            num_iterations=2, n_eval=0)  # fmt: skip
    fit(module, data, max_steps=steps)
    completions = every_completion(3 + len(alphabet), longest)
    prompt = tokenizer(alphabet[0]).input_ids
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    reward = torch.tensor([score(text, c[-1] == 1) for text, c in zip(texts, completions, strict=True)])
    start = distribution(module.reference, prompt, completions, temperature)
    assert start.sum() == pytest.approx(1.0, abs=1e-4)
    optimum = (start.log() + reward / beta).softmax(-1)
    learned = distribution(module.model, prompt, completions, temperature)
    return 0.5 * (start - optimum).abs().sum(), 0.5 * (learned - optimum).abs().sum()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_bandit_converges_to_the_optimum_under_the_price_of_kl(tmp_path, temperature):
    before, after = learned_and_optimal(
        tmp_path, "ab", 1, lambda text, finished: {"a": 1.0, "b": -0.5}.get(text, 0.0), steps=100, beta=0.3,
        temperature=temperature, batch_size=512, config={"initializer_range": 0.5},
    )  # fmt: skip
    assert before > 0.2 and after <= 0.05


#: The shortest walk from a to c is one step, ``c``; ``bc`` is another, and ``aac``, ``abc`` leave the edges.
EDGES = {"a": "bc", "b": "ca", "c": "a"}


def optimality(walk: str, finished: bool) -> float:
    follows = all(there in EDGES[here] for here, there in zip("a" + walk, walk, strict=False))
    return 1 / len(walk) if finished and walk.endswith("c") and follows else 0.0


@pytest.mark.slow
def test_walks_on_a_graph_converge_to_the_optimum_under_the_price_of_kl(tmp_path):
    before, after = learned_and_optimal(
        tmp_path, "abc", 3, optimality, steps=400, beta=0.3, temperature=1.0, batch_size=1024,
        config={"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3},
    )  # fmt: skip
    assert before > 0.2 and after <= 0.05


# -------------------------------------------------------------------- metrics


def test_objectives_are_the_generations_own_and_add_up(make):
    seen: dict[str, Any] = {}

    class Spy(RLHFPPO):
        def prepare(self, rollout):
            seen.update(rollout, fields=super().prepare(rollout))
            return seen["fields"]

    curves = Curves()
    module, data = make(Spy, {"num_iterations": 2}, beta=0.5, learning_rate=0.02, completions_steps=0)
    fit(module, data, max_steps=4, logger=curves, log_every_n_steps=1)
    generation = [metrics for _, metrics in curves.points if "train/objective/kl" in metrics][-1]
    with torch.no_grad():
        text = (seen["tokens"], seen["prompt_length"], seen["length"])
        ref, _ = completion_log_probs(module.reference, *text)
    fields = seen["fields"]
    kl = (fields["log_prob"] - ref).sum(1)
    assert generation["train/objective/kl"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert generation["train/objective/non_score_reward"] == pytest.approx(-0.5 * kl.mean().item(), rel=1e-4)
    assert generation["train/objective/scores"] == pytest.approx(seen["reward"].mean().item(), rel=1e-4)
    total = generation["train/objective/scores"] + generation["train/objective/non_score_reward"]
    assert generation["train/objective/rlhf_reward"] == pytest.approx(total, rel=1e-4)
    assert generation["train/val/num_eos_tokens"] == seen["finished"].sum()
    assert generation["train/completions/mean_length"] == seen["length"].float().mean()
    assert generation["train/rewards/exact_answer/mean"] == pytest.approx(seen["rewards"][:, 0].mean().item())
    mask, returns, value = fields["mask"], fields["returns"], fields["value"]
    explained = 1 - (returns - value)[mask].var() / returns[mask].var()
    assert generation["train/val/explained_variance"] == pytest.approx(explained.item(), rel=1e-3)
    names = ("loss/policy_avg", "loss/value_avg", "policy/approxkl_avg", "policy/clipfrac_avg", "val/ratio", "beta",
             "val/clipfrac_avg", "objective/entropy", "num_tokens")  # fmt: skip
    assert {f"train/{name}" for name in names} <= generation.keys()
    # λ = .95, γ = 1: an undiscounted return is the reward of the whole where the value is 0.
    assert module.num_tokens > 0


def test_evaluation_shows_score_and_kl_of_held_out_completions(make, make_trainer, folders):
    held_out = {"eval_path": str(folders / "prompts.jsonl"), "n_eval": 5, "eval_num_generations": 2,
                "eval_temperature": 1.0}  # fmt: skip
    export(folders / "other", "causal", 7)
    module, data = make(data=held_out, ref_model_name_or_path=str(folders / "other"))
    (metrics,) = make_trainer().test(module, datamodule=data, verbose=False)
    (batch,) = list(data.held_out_completions())
    text = (batch["tokens"], batch["prompt_length"], batch["length"])
    with torch.no_grad():
        kl = completion_log_probs(module.model, *text)[0] - completion_log_probs(module.reference, *text)[0]
    assert metrics["eval/kl"] == pytest.approx(kl.sum(1).mean().item(), rel=1e-4)
    assert metrics["eval/scores"] == pytest.approx(module.scores(*text).mean().item(), rel=1e-4)
    assert abs(metrics["eval/kl"]) > 1e-3
    assert batch["tokens"].shape[0] == 10


def test_advantages_in_the_batch_are_whitened_over_the_generation(make):
    watch = Watch()
    module, data = make(data={"steps_per_generation": 2})
    fit(module, data, max_steps=2, callbacks=[watch])
    values = torch.cat([batch["advantage"][batch["mask"]] for batch in watch.batches])
    torch.testing.assert_close(values.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(values.std(), torch.tensor(1.0), atol=1e-4, rtol=0)


def test_clip_fraction_counts_where_the_clip_binds(make):
    """Ratios beyond ε count where the advantage pushes further, and nowhere else."""
    module, _ = make(cliprange=0.2)
    old = torch.zeros(1, 4)
    log_prob = torch.tensor([[0.5, 0.5, -0.5, 0.1]])
    batch = {"mask": torch.ones(1, 4, dtype=torch.bool), "log_prob": old,
             "advantage": torch.tensor([[1.0, -1.0, -1.0, 1.0]]), "value": torch.zeros(1, 4)}  # fmt: skip
    value = torch.tensor([[0.0, 0.1, 0.3, -0.5]])
    module.record_minibatch(log_prob, value, torch.tensor(0.0), torch.tensor(0.0), batch)
    means = module._means.means()
    assert means["policy/clipfrac_avg"] == 0.5
    assert means["val/clipfrac_avg"] == 0.5
    assert means["policy/approxkl_avg"] == pytest.approx((3 * 0.25 + 0.01) / 8)
    assert means["val/ratio"] == pytest.approx((2 * math.exp(0.5) + math.exp(-0.5) + math.exp(0.1)) / 4)


# -------------------------------------------------------------------- checkpoints and ranks


@pytest.mark.long
@pytest.mark.parametrize(
    "model",
    [
        {},
        *(
            pytest.param(model, marks=pytest.mark.slow)
            for model in ({"value_head_on_policy": True}, {"lora": {"r": 2, "target_modules": "all-linear"}})
        ),
    ],
)
def test_a_run_resumed_inside_of_a_generation_ends_where_the_uninterrupted_one_does(make, tmp_path, model):
    def run(name, ckpt_path=None, callbacks=None):
        module, data = make(
            data={"steps_per_generation": 2, "num_iterations": 2, "ptx_batch_size": 2}, target_kl=0.5, ptx_coef=0.1,
            lr_scheduler_type="linear", **model,
        )  # fmt: skip
        limits = {"max_steps": 6, "accumulate_grad_batches": 2}
        checkpoints = {"callbacks": callbacks, "enable_checkpointing": callbacks is not None}
        fit(module, data, ckpt_path=ckpt_path, **limits, **checkpoints).save_checkpoint(tmp_path / name)

    every_step = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run("whole.ckpt", callbacks=[every_step])
    # In the first generation, at its end, in the second one.
    for step in (1, 4, 5):
        run("resumed.ckpt", tmp_path / f"step={step}.ckpt")
        assert_equal_checkpoints(tmp_path / "whole.ckpt", tmp_path / "resumed.ckpt")


def test_a_checkpoint_needs_none_of_the_directories_it_came_from(tmp_path, folders):
    for name in ("policy", "reward", "other"):
        export(tmp_path / name, "score" if name == "reward" else "causal", 5, hidden_size=32 if name == "other" else 16)
    module = RLHFPPO(str(tmp_path / "policy"), reward_model_name_or_path=str(tmp_path / "reward"),
                     ref_model_name_or_path=str(tmp_path / "other"),
                     max_completion_length=4, lr_scheduler_type="constant", save_frozen_weights=True)  # fmt: skip
    data = PromptDataModule(path=str(folders / "prompts.jsonl"), num_generations=1, batch_size=4, n_eval=0)
    fit(module, data, max_steps=1).save_checkpoint(tmp_path / "last.ckpt")
    for name in ("policy", "reward", "other"):
        shutil.rmtree(tmp_path / name)
    loaded = RLHFPPO.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    saved = module.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    text = (torch.tensor([[5, 6, 7, 8]]), torch.tensor([2]), torch.tensor([2]))
    with torch.no_grad():
        for name, expected in module.evaluate_completions(*text).items():
            torch.testing.assert_close(loaded.evaluate_completions(*text)[name], expected)
        torch.testing.assert_close(loaded.scores(*text), module.scores(*text))
    loaded.export(tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(exported.model.norm.weight, module.model.model.norm.weight)


class Collect(L.Callback):
    """Writes what a run ended with, from rank 0."""

    def __init__(self, path: Any) -> None:
        self.path = str(path)

    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            torch.save({"weights": weights(pl_module), "beta": pl_module.beta, "num_tokens": pl_module.num_tokens},
                       self.path)  # fmt: skip


@pytest.mark.long
def test_two_ranks_are_one_with_twice_the_batch(make, tmp_path):
    """Whitening, normalisers and β are those of all completions together."""
    settings = {"optimizer": sgd, "target_kl": 0.01, "whiten_rewards": True, "ptx_coef": 0.5, "learning_rate": 0.5}
    for ranks in (1, 2):
        module, data = make(
            data={"batch_size": 8 // ranks, "num_iterations": 2, "ptx_batch_size": 4 // ranks}, **settings
        )
        fit(module, data, max_steps=4, devices=ranks, strategy="ddp_fork" if ranks > 1 else "auto",
            callbacks=[Collect(tmp_path / f"{ranks}.pt")])  # fmt: skip
    one, two = (torch.load(tmp_path / f"{ranks}.pt", weights_only=True) for ranks in (1, 2))
    start, _ = make()
    start.configure_model()
    assert (one["weights"] - weights(start)).abs().max() > 1e-2
    torch.testing.assert_close(one["weights"], two["weights"], atol=1e-5, rtol=1e-4)
    assert one["beta"] == pytest.approx(two["beta"], rel=1e-6) and one["beta"] != 0.05
    assert one["num_tokens"] == two["num_tokens"]


@pytest.mark.long
def test_objectives_of_two_ranks_count_every_scored_completion_once(make, tmp_path):
    def objectives(ranks):
        module, data = make(Particular, {"batch_size": 8 // ranks}, beta=0.3)
        module.applies = 0.2
        fit(module, data, max_steps=1, devices=ranks, strategy="ddp" if ranks > 1 else "auto")
        points = {name: value for name, value in module.latest_metrics.items() if "objective" in name}
        return {"points": points, "scores": [score for score in module.scores.tolist() if score == score]}

    one, two = objectives(1), on_ranks(lambda: objectives(2), tmp_path)
    assert len(two[0]["scores"]) != len(two[1]["scores"]), "the test needs ranks with unequal numbers"
    scores = two[0]["scores"] + two[1]["scores"]
    for rank in two:
        assert rank["points"]["train/objective/scores"] == pytest.approx(sum(scores) / len(scores), rel=1e-5)
        assert rank["points"] == pytest.approx(one["points"], rel=1e-4)


# -------------------------------------------------------------------- what people get wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": 1.5}, r"gamma=1.5 must lie in \[0, 1\]"),
        ({"lam": -0.1}, r"lam=-0.1 must lie in \[0, 1\]"),
        ({"beta": -1.0}, "beta=-1.0 must be a finite number of at least 0"),
        ({"cliprange": float("nan")}, "cliprange=nan must be a finite number of at least 0"),
        ({"temperature": 0.0}, "temperature=0.0 must be a finite number above 0"),
        ({"target_kl": 0.0}, "target_kl=0.0 must be a finite number above 0"),
        ({"kl_gain": 5.0}, "kl_gain=5.0"),
        ({"kl_estimator": "k2"}, "kl_estimator='k2' must be one of k1, k3"),
        ({"max_completion_length": 0}, "max_completion_length=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    with pytest.raises(UsageError, match=message):
        RLHFPPO(**{"reward_model_name_or_path": "unread", **arguments})


def test_models_that_do_not_fit(make, folders, tmp_path):
    def refused(match, **arguments):
        with pytest.raises(UsageError, match=match) as raised:
            make(**arguments)[0].configure_model()
        assert "\n" not in str(raised.value)

    other = letters(ALPHABET[::-1])
    stranger, judge = export(tmp_path / "stranger", "causal", 0, other), export(tmp_path / "judge", "score", 0, other)
    refused(r"judge.*id 3 is ':', in the policy's 15 it is 'a'", reward_model_name_or_path=judge)
    refused(r"^ref_model_name_or_path='.*stranger'.*id 3 is ':'", ref_model_name_or_path=stranger)
    refused(r"^reward_model_name_or_path='.*policy'.*no reward head", reward_model_name_or_path=str(folders / "policy"))
    refused(r"^reward_model_name_or_path='no/such/place'", reward_model_name_or_path="no/such/place")
    (tmp_path / "empty").mkdir()
    refused(r"^ref_model_name_or_path='.*empty' is no reference", ref_model_name_or_path=str(tmp_path / "empty"))
    (tmp_path / "bad.ckpt").write_bytes(b"not a checkpoint")
    refused(r"^reward_model_name_or_path=.*bad.ckpt is damaged", reward_model_name_or_path=str(tmp_path / "bad.ckpt"))


@pytest.mark.parametrize("which", ["reward", "reference"])
def test_texts_that_another_model_cannot_take(make, tmp_path, which):
    short = export(tmp_path / "short", "score" if which == "reward" else "causal", 0, max_position_embeddings=8)
    argument = {"reward": "reward_model_name_or_path", "reference": "ref_model_name_or_path"}[which]
    with pytest.raises(UsageError, match=rf"the {which}.* takes 8; lower max_completion_length"):
        fit(*make(**{argument: short}), max_steps=1)


@pytest.mark.long
def test_the_value_function_approaches_the_exact_one() -> None:
    """With a fixed policy, V of every state is the expected reward over all completions, which are enumerated."""

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        return [value_of(ids) for ids in completion_ids]

    def value_of(ids: Any) -> float:
        """Something that depends on the first token, on the second and on whether the text ends."""
        return sum(float(token % 3 == place) for place, token in enumerate(ids)) + 0.5 * (ids[-1] == eos)

    module = RLHFPPO(
        model_config={**TINY, "initializer_range": 0.3}, max_completion_length=2, learning_rate=5e-3, beta=0.0,
        vf_coef=1.0, cliprange_value=None, lr_scheduler_type="constant", lam=1.0,
    )  # fmt: skip
    module.configure_model()
    eos = module.tokenizer.eos_token_id
    module.policy_loss = lambda log_prob, batch: 0.0 * log_prob.sum()  # type: ignore[method-assign]
    data = PromptDataModule("addition", n_train=1, num_generations=256, batch_size=256, eval_steps=0,
                            reward_funcs=reward)  # fmt: skip
    fit(module, data, max_steps=250)
    prompt = data.train_records[0]["prompt_ids"]
    n, start = len(module.tokenizer), len(prompt)
    with torch.no_grad():
        first = module.model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        one = torch.tensor([[*prompt, token] for token in range(n)])
        second = module.model(one).logits[:, -1].double().softmax(-1)
        after = torch.tensor([[value_of([a, b]) for b in range(n)] for a in range(n)], dtype=torch.float64)
        exact = (second * after).sum(1)
        exact_start = sum(first[a] * (value_of([a]) if a == eos else exact[a]) for a in range(n))
        texts = torch.cat([one, torch.zeros(n, 1, dtype=torch.long)], 1)
        _, value, _ = module.policy_and_value(texts, torch.full((n,), start), torch.full((n,), 2))
    visited = first > 0.004  # states that a run meets some dozens of times
    visited[eos] = False
    assert int(visited.sum()) > 10
    assert abs(float(value[:, 0].mean() - exact_start)) < 0.05
    error = (value[:, 1].double() - exact).abs()
    assert float((first[visited] * error[visited]).sum() / first[visited].sum()) < 0.06
    assert float(torch.corrcoef(torch.stack([value[visited, 1].double(), exact[visited]]))[0, 1]) > 0.98
