import json
import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import yaml

from datamodules.language.worlds import WORLDS, Guess, TextMaze
from recipes import agent, configs, one_world
from rl_modules import SFT
from rl_modules import functional as F

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    agent.write_records("maze", 8, 0, tmp_path)
    return tmp_path


def test_every_world_has_a_config_of_its_environment():
    for name, world in WORLDS.items():
        data = yaml.safe_load(configs.text(f"agent/{name}.yaml"))["data"]["init_args"]
        assert data["environment"] == f"{world.__module__}:{world.__name__}"


def test_the_template_renders_a_turn_as_the_model_writes_it(folder):
    """What a policy must write in a turn is what SFT learns, calls of tools included."""
    module = SFT(model_config=SMALL, tokenizer_name_or_path=str(folder / "tokenizer"))
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "1+1"}}}
    said = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "f", "content": "2"}, {"role": "assistant", "content": "2"}]  # fmt: skip
    text = module.tokenizer.apply_chat_template(said, tokenize=False)
    assert text == '1+1=\n<tool_call>{"name": "f", "arguments": {"x": "1+1"}}</tool_call><eos>2\n2<eos>'


def test_the_exact_return_of_a_dialogue_is_the_sum_over_all_walks(folder, monkeypatch):
    """Compared with the probability of each whole walk, read in one pass."""
    monkeypatch.setattr(one_world, "HORIZON", 3)
    torch.manual_seed(0)
    module = SFT(model_config=SMALL, tokenizer_name_or_path=str(folder / "tokenizer"))
    module.configure_model()
    module.eval()
    tokenizer, total, known = module.tokenizer, 0.0, 0.0
    walks = set()
    for moves in product("ldru", repeat=3):
        world = TextMaze(max_steps=3, brief=True)
        said, done, walk, reward = list(world.reset({})), False, "", 0.0
        for move in moves:
            if done:
                break
            walk += move
            said.append({"role": "assistant", "content": move})
            answer, earned, done = world.step(said[-1])
            said += answer
            reward += earned
        if walk in walks:
            continue
        walks.add(walk)
        ids = torch.tensor(tokenizer.apply_chat_template(said)["input_ids"])
        stop = tokenizer.eos_token_id
        written = [i for i in range(len(ids)) if ids[i] == stop or (i + 1 < len(ids) and ids[i + 1] == stop)]
        with torch.no_grad():
            log_prob = F.token_log_probs(module.model(ids[None, :-1]).logits, ids[None, 1:])[0]
        chance = math.exp(sum(float(log_prob[i - 1]) for i in written))
        total += chance * reward
        known += chance
    expected = total - 10 * (1 - known)
    assert one_world.dialogue_return(module, None) == pytest.approx(expected, abs=1e-4)


def test_a_greedy_policy_s_return_is_that_of_its_walk():
    class Player:
        def __init__(self, moves):
            self.moves = moves

        def predict(self, observation, state=None, episode_start=None, deterministic=False):
            assert deterministic and bool(episode_start[0]) == (state is None)
            return self.moves[state or 0], (state or 0) + 1

    assert one_world.greedy_return(Player([2, 2, 1]), None) == 10
    assert one_world.greedy_return(Player([2, 1]), None) == -10
    assert one_world.greedy_return(Player([0] * 8), None) == 0


def test_a_learner_that_misses_its_target_is_marked_and_the_exit_status_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(one_world, "CONTROL", {})
    for regret, code in ((0.1, 0), (10.1, 1)):
        monkeypatch.setattr(one_world, "language_model", lambda folder, seed, best, last=regret: [(0, 14.7), (8, last)])
        with pytest.raises(SystemExit) if code else nullcontext():
            one_world.main(["--folder", str(tmp_path)])
        out, err = capsys.readouterr()
        assert ("| language model | 10.1000 | missed |" in out) == bool(code)
        assert ("error: the regret of language model is 10.1; the target is at most 0.5" in err) == bool(code)
        assert "| value iteration | 0.0000 |  |" in out


@pytest.mark.parametrize(("words", "says"), [
    (["--world", "gues"], "invalid choice: 'gues'"), (["--grop.x=1"], "--grpo"),
])  # fmt: skip
def test_a_wrong_option_is_one_sentence(words, says, capsys):
    with pytest.raises(SystemExit):
        agent.main(words)
    assert says in capsys.readouterr().err


@pytest.mark.long
def test_the_pipeline_trains_both_stages_and_a_second_call_repeats_nothing(tmp_path, capsys):
    model = json.dumps(SMALL)
    words = ["--world", "guess", "--folder", str(tmp_path), "--dialogues", "64", f"--sft.model.model_config={model}",
             "--sft.trainer.max_steps=2", "--grpo.trainer.max_steps=1", "--grpo.data.batch_size=16",
             "--grpo.data.n_eval=8", "--grpo.data.max_turns=3"]  # fmt: skip
    agent.main(words)
    shown = capsys.readouterr().out
    assert "| grpo |" in shown and "environment/turns" in shown
    assert json.loads((tmp_path / "records/train.jsonl").read_text().splitlines()[0])["secret"] in range(1, 65)
    agent.main(words)
    assert "grpo: done already" in capsys.readouterr().out
    assert Guess.optimum() == 5.125
