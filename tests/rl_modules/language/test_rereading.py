"""A reward model with another tokenizer than the policy reads the same texts in its own tokens."""

import json

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from datamodules import PreferenceDataModule, PromptDataModule
from rl_modules.common.errors import UsageError
from rl_modules.language.critics import sequence_scores
from rl_modules.language.grpo import GRPO
from rl_modules.language.rereading import encode_again, with_ended_turns
from rl_modules.language.reward_model import RewardModel, load_reward_model
from rl_modules.language.rlhf_ppo import RLHFPPO
from rl_modules.language.tokenizer import ALPHABET, character_tokenizer
from tests.training import assert_resumes_exactly, fit

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2}  # fmt: skip
TEMPLATE = ("{% for m in messages %}({{ m['role'][0] }}:{{ m['content'] }}){% endfor %}"
            "{% if add_generation_prompt %}(a:{% endif %}")  # fmt: skip
SAMPLING = {"model_config": TINY, "lr_scheduler_type": "constant", "max_completion_length": 4}


def pair_tokenizer(template=None):
    """Characters in another order, and some pairs of digits as one token."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<eos>", "<pad>", *reversed(ALPHABET)])}
    merges = [(a, b) for a in "0123456789" for b in "0123456789"]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
                                   chat_template=template)  # fmt: skip


@pytest.fixture
def judge(tmp_path):
    """The directory of a reward model over pairs of digits."""

    def write(template=None):
        module = RewardModel(model_config=TINY)
        module._tokenizer = pair_tokenizer(template)
        module.configure_model()
        module.reward_offset = 0.25
        return str(module.export(tmp_path / "judge"))

    return write


def addition(**arguments):
    return PromptDataModule("addition", **{"batch_size": 8, "num_generations": 4, "n_train": 8, "eval_steps": 0,
                                           "n_eval": 4, **arguments})  # fmt: skip


class Watched(GRPO):
    """Keeps each generation with the reward model's scores in ``seen``."""

    def rewards(self, rollout):
        reward = super().rewards(rollout)
        self.__dict__.setdefault("seen", []).append((rollout, rollout["rewards"][:, -1].clone()))
        return reward


@pytest.mark.long
def test_scores_are_those_of_the_judge_alone_on_its_own_tokens(judge):
    path = judge()
    policy = Watched(reward_model_name_or_path=path, **SAMPLING)
    fit(policy, addition(), max_steps=2)
    found = load_reward_model(path)
    tokenizer = found.tokenizer
    for rollout, scores in policy.seen:
        rows = zip(rollout["records"], rollout["texts"], rollout["finished"].tolist(), scores, strict=True)
        for record, text, finished, score in rows:
            ids = tokenizer(record["prompt"]).input_ids + tokenizer(text).input_ids
            ids += [tokenizer.eos_token_id] * finished
            with torch.no_grad():
                alone = sequence_scores(found.model, torch.tensor([ids]), torch.tensor([len(ids)])) - 0.25
            torch.testing.assert_close(score, alone[0], atol=1e-5, rtol=1e-5)
    assert tokenizer("1+2=").input_ids != character_tokenizer()("1+2=").input_ids


def test_messages_go_through_the_judges_own_template():
    tokenizer = pair_tokenizer(TEMPLATE)
    asked = [
        [{"role": "user", "content": "12"}],
        [{"role": "user", "content": "1"}, {"role": "assistant", "content": "x"}],
    ]
    tokens, length = encode_again(tokenizer, asked, ["3", "4"], [True, False], 100)
    texts = [tokenizer.decode(row[:n]) for row, n in zip(tokens.tolist(), length.tolist(), strict=True)]
    assert texts == ["(u:12)(a:3)", "(u:1)(a:x4"], "a turn ends as it does in preferences, and only if it has ended"
    with pytest.raises(UsageError, match="the reward model's tokenizer has no chat template"):
        encode_again(pair_tokenizer(), asked, ["3", "4"], [True, True], 100)
    with pytest.raises(UsageError, match="have 10 of the reward model's tokens, it takes 9"):
        encode_again(tokenizer, asked, ["3", "4"], [True, False], 9)


def test_an_answer_is_read_as_the_judge_was_trained_on_it():
    """The records of a datamodule that trained the judge say in which tokens; its own predictions, with which score."""
    pairs = [{"prompt": f"{i}1+2=", "chosen": f"{i}3", "rejected": "10x"} for i in range(4)]
    module = RewardModel(model_config=TINY, tokenizer_name_or_path=pair_tokenizer(TEMPLATE))
    data = PreferenceDataModule(dataset=Dataset.from_list(pairs), eval_split="train", batch_size=4, n_eval=4)
    trainer = fit(module, data, max_steps=1)
    prompts, answers = [pair["prompt"] for pair in pairs], [pair["chosen"] for pair in pairs]
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    ids = [record["prompt_ids"] + record["chosen_ids"] for record in data.train_records]
    tokens, length = encode_again(module.tokenizer, messages, answers, [True] * 4, 100)
    assert [row[:n] for row, n in zip(tokens.tolist(), length.tolist(), strict=True)] == ids
    tokens, length = encode_again(module.tokenizer, messages, answers, [False] * 4, 100)
    assert [row[:n] for row, n in zip(tokens.tolist(), length.tolist(), strict=True)] == [row[:-1] for row in ids]
    rewards = torch.cat([batch["chosen_reward"] for batch in trainer.predict(module, datamodule=data)])
    for asked in (prompts, messages):
        torch.testing.assert_close(module.score(asked, answers), rewards)
    # Without the template a text is another one, also to the judge.
    assert (module.score(prompts, answers, chat_template=False) - rewards).abs().min() > 1e-3


def characters(eos="<eos>", template=None):
    """One vocabulary, whatever ends a text."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    return tokenizer


@pytest.mark.parametrize("kind", ["end", "template", "line after the end"])
def test_a_judge_of_the_same_vocabulary_reads_its_own_end_and_template(kind, tmp_path):
    """And where all is the policy's, what its template writes after the end, as in the judge's preferences."""
    template = TEMPLATE.replace("})", "}{{ eos_token }})") if kind.startswith("line") else TEMPLATE
    of_policy = characters(template=template)
    of_judge = {"end": characters("<end>", TEMPLATE), "template": characters(template=TEMPLATE.replace("(a:", "[a:")),
                "line after the end": of_policy}[kind]  # fmt: skip
    assert of_policy.get_vocab() == of_judge.get_vocab()
    judge = RewardModel(model_config=TINY, tokenizer_name_or_path=of_judge)
    judge.configure_model()
    path = str(judge.export(tmp_path / "judge"))
    policy = Watched(reward_model_name_or_path=path, tokenizer_name_or_path=of_policy, **SAMPLING)
    fit(policy, addition(), max_steps=2)
    compared = 0
    for rollout, scores in policy.seen:
        alone = judge.score(rollout["asked"], rollout["texts"])
        # `score` reads whole answers: those that have ended.
        ended = rollout["finished"].tolist()
        compared += sum(ended)
        torch.testing.assert_close(scores[ended], alone[ended], atol=1e-5, rtol=1e-5)
    assert compared


def test_prompts_that_are_texts_have_no_end_of_a_template_beside_messages():
    tokenizer = characters(template=TEMPLATE.replace("})", "}{{ eos_token }})"))
    rollout = {"asked": ["1", [{"role": "user", "content": "2"}]], "tokens": torch.ones(2, 3, dtype=torch.int64),
               "prompt_length": torch.tensor([1, 1]), "length": torch.tensor([2, 2]),
               "finished": torch.tensor([True, True])}  # fmt: skip
    for order in ([0, 1], [1, 0]):
        rows = {name: [x[i] for i in order] if name == "asked" else x[order] for name, x in rollout.items()}
        assert with_ended_turns(rows, tokenizer, 8)["length"].tolist() == [[2, 3][i] for i in order]


@pytest.mark.long
def test_such_runs_resume_exactly_and_evaluate(judge, tmp_path):
    path = judge()
    make = lambda keep: GRPO(reward_model_name_or_path=path, save_frozen_weights=keep, **SAMPLING)  # noqa: E731
    assert_resumes_exactly(lambda: make(False), addition, tmp_path, epochs=2)
    trainer = fit(make(True), addition(), max_steps=1)
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    for name in ("whole.ckpt", "kept.ckpt"):
        loaded = GRPO.load_from_checkpoint(tmp_path / name, weights_only=True)
        assert loaded.reward_tokenizer.get_vocab() == pair_tokenizer().get_vocab()
    module = make(False)
    metrics = fit(module, addition(eval_steps=1, reward_funcs=[]), max_steps=1).callback_metrics
    assert "eval/rewards/reward_model" in metrics and module.best_metric == ("eval/pass@1", "max")


def test_a_checkpoint_holds_a_judge_of_a_smaller_vocabulary(tmp_path):
    judge = RewardModel(model_config=TINY)
    judge.configure_model()
    given = {"reward_model_name_or_path": str(judge.export(tmp_path / "judge")), "save_frozen_weights": True}
    module = GRPO(tokenizer_name_or_path=pair_tokenizer(), **given, **SAMPLING)
    fit(module, addition(), max_steps=1).save_checkpoint(tmp_path / "kept.ckpt")
    loaded = GRPO.load_from_checkpoint(tmp_path / "kept.ckpt", weights_only=True)
    words = [len(made.tokenizer) for made in (judge, loaded)]
    assert len(loaded.reward_tokenizer) == words[0] < words[1]
    torch.testing.assert_close(loaded.reward_model.state_dict(), judge.model.state_dict(), rtol=0, atol=0)


@pytest.mark.long
def test_without_reward_functions_the_judges_score_is_monitored(judge, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(8)))
    path = str(tmp_path / "prompts.jsonl")
    data = lambda **more: PromptDataModule(path=path, eval_path=path, batch_size=8, n_eval=4, eval_steps=1, **more)  # noqa: E731
    grpo = GRPO(reward_model_name_or_path=judge(), **SAMPLING)
    metrics = fit(grpo, data(num_generations=4), max_steps=1).callback_metrics
    assert grpo.best_metric == ("eval/rewards/reward_model", "max") and grpo.best_metric[0] in metrics
    ppo = RLHFPPO(reward_model_name_or_path=judge(), value_head_on_policy=True, **SAMPLING)
    metrics = fit(ppo, data(num_generations=1), max_steps=1).callback_metrics
    assert ppo.best_metric == ("eval/scores", "max") and ppo.best_metric[0] in metrics


def test_a_value_model_needs_the_policys_tokens(judge):
    module = RLHFPPO(reward_model_name_or_path=judge(), **SAMPLING)
    with pytest.raises(UsageError, match=r"^reward_model_name_or_path=.*value_head_on_policy=true has none.*id 0"):
        fit(module, addition(num_generations=1), max_steps=1)
    assert character_tokenizer().get_vocab() != pair_tokenizer().get_vocab()
