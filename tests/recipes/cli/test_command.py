import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch
import yaml
from jsonargparse._loaders_dumpers import yaml_load
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamodules import RolloutDataModule
from recipes import configs
from recipes.cli import main
from recipes.cli.classes import prepared
from recipes.summary import evaluate
from rl_modules import PPO
from tests.training import fit

SMALL = [
    "--data.total_timesteps=1024",
    "--data.n_epochs=2",
    "--data.eval_freq=512",
    "--data.n_eval_episodes=2",
    "--data.n_test_episodes=3",
]


@pytest.fixture
def rl(tmp_path, monkeypatch, capsys):
    """Run ``rl`` in an empty folder; returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*args, default_config=None):
        code = 0
        try:
            main(list(args), default_config)
        except SystemExit as exit_:
            code = exit_.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of one short run."""
    folder = tmp_path_factory.mktemp("run")
    before = Path.cwd()
    os.chdir(folder)
    try:
        main(["fit", "--config", "ppo/cartpole.yaml", "--seed_everything", "5", *SMALL])
    finally:
        os.chdir(before)
    return next(folder.glob("logs/*/version_0"))


def test_fit_leaves_best_and_last_checkpoint_curves_and_settings(trained):
    assert trained.parent.name == "PPO-CartPole-v1"
    for name in ("best.ckpt", "last.ckpt"):
        checkpoint = torch.load(trained / "checkpoints" / name, weights_only=True)
        assert checkpoint["hyper_parameters"]["gamma"] == 0.98
    assert checkpoint["RolloutDataModule"]["num_timesteps"] == 1024
    assert checkpoint["datamodule_hyper_parameters"]["seed"] == 5

    events = EventAccumulator(str(trained), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "rollout/ep_rew_mean", "rollout/ep_len_mean", "eval/mean_reward", "eval/mean_ep_length", "time/fps",
        "time/total_timesteps", "train/policy_gradient_loss", "train/value_loss", "train/entropy_loss",
        "train/approx_kl", "train/clip_fraction", "train/explained_variance", "train/learning_rate", "train/clip_range",
        "test/mean_reward", "test/std_reward", "test/mean_ep_length",
    } <= tags  # fmt: skip
    # The axis is transitions: an epoch has 256 of them, and every fourth is logged.
    assert {e.step for e in events.Scalars("train/approx_kl")} <= {512, 1024}
    assert [e.step for e in events.Scalars("eval/mean_reward")] == [0, 512, 1024]
    assert events.Scalars("time/total_timesteps")[-1].value == 1024
    # The last rollout of a linear schedule, 1,024 of 1,024 transitions in.
    assert events.Scalars("train/learning_rate")[-1].value == 0.0
    assert any("config" in tag for tag in events.Tags()["tensors"])
    assert any("hparams" in tag for tag in events.summary_metadata)


def test_the_final_evaluation_has_every_metric_of_a_test():
    class Succeeds(gym.wrappers.TimeLimit):
        def step(self, action):
            *returned, info = super().step(action)
            return *returned, {**info, "is_success": True}

    data = RolloutDataModule(lambda: Succeeds(gym.make("CartPole-v1"), 5), n_envs=1, n_steps=8, total_timesteps=16,
                             batch_size=8, eval_freq=0, n_test_episodes=2)  # fmt: skip
    trainer = fit(PPO(net_arch=[8]), data)
    found, _ = evaluate(trainer, trainer.model, data, controls=True)
    assert found == trainer.test(trainer.model, datamodule=data, verbose=False)[0]
    assert found["test/mean_ep_length"] == 5 and found["test/success_rate"] == 1


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m recipes list | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=Path(__file__).parents[3], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_fit_prints_a_summary(rl):
    code, out, err = rl("fit", "--config", "ppo/cartpole.yaml", *SMALL)
    assert code == 0
    lines = [line for line in out.splitlines() if line.strip()]
    assert lines[0] == "rl fit --config ppo/cartpole.yaml --data.total_timesteps=1024 --data.n_epochs=2 …: starting"
    assert lines[1].startswith("PPO on CartPole-v1")
    assert "± " in lines[1]
    assert "over 3 episodes" in lines[1]
    assert "1,024 in" in out
    assert "per second" in out
    for mark in ("last checkpoint", "best checkpoint"):
        path = next(line.split()[-1] for line in lines if line.startswith(mark))
        assert Path(path).is_file()
    assert re.search(r"^best evaluation +eval/mean_reward [\d.]+ after [\d,]+ transitions$", out, re.MULTILINE)
    assert "tensorboard --logdir logs/PPO-CartPole-v1 (run version_0)" in out
    # No bar, no warnings: the output is no terminal.
    assert "%" not in err


def test_validate_and_predict_evaluate_a_checkpoint(rl, trained):
    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    code, out, _ = rl(
        "validate", "--config", "ppo/cartpole.yaml", "--data.n_eval_episodes", "2", "--ckpt_path", checkpoint
    )
    assert code == 0
    assert "eval/mean_reward" in out
    rows = {}
    for name in ("episodes.csv", "episodes.jsonl"):
        code, out, _ = rl("predict", "--config", "ppo/cartpole.yaml", "--data.n_test_episodes", "3", "--ckpt_path",
                          checkpoint, "--output", name)  # fmt: skip
        assert code == 0
        assert f"3 episodes written to {name}" in out
    with Path("episodes.csv").open() as file:
        rows["csv"] = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    rows["jsonl"] = [json.loads(line) for line in Path("episodes.jsonl").read_text().splitlines()]
    assert rows["csv"] == rows["jsonl"]
    assert [set(row) for row in rows["csv"]] == [{"episode", "return", "length", "seed"}] * 3
    assert all(row["return"] == row["length"] for row in rows["csv"])


@pytest.mark.long
def test_an_argument_of_a_users_network_can_be_given_alone(rl, tmp_path):
    config = tmp_path / "mine.yaml"
    features = {"class_path": "tests.networks.Features", "init_args": {"width": 3}}
    config.write_text(yaml.safe_dump({"model": {"class_path": "PPO", "init_args": {"features_extractor": features}}}))
    words = ["--config", "ppo/cartpole.yaml", "--config", str(config), "--data.total_timesteps=512",
             "--data.eval_freq=0", "--data.n_test_episodes=2"]  # fmt: skip
    code, _, err = rl("fit", *words, "--model.features_extractor.init_args.width=5")
    assert code == 0, err
    recorded = yaml.safe_load(next(tmp_path.glob("logs/*/version_0/config.yaml")).read_text())
    taken = recorded["model"]["init_args"]["features_extractor"]
    assert taken == {"class_path": "tests.networks.Features", "init_args": {"width": 5}}
    code, _, err = rl("fit", *words, "--model.features_extractor.init_args.height=5")
    assert code == 1 and "features_extractor: tests.networks.Features can't be made" in err and "'height'" in err


@pytest.mark.long
@pytest.mark.parametrize("path", ["nowhere.Noise", "rl_modules.action_noise.Noise"])
def test_a_class_in_a_config_that_does_not_exist_is_named(rl, tmp_path, path):
    noise = {"class_path": path, "init_args": {"sigma": 0.2}}
    settings = {"model": {"class_path": "TD3", "init_args": {"action_noise": noise}},
                "data": {"class_path": "ReplayDataModule", "init_args": {"env_id": "Pendulum-v1"}}}  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    code, _, err = rl("fit", "--config", str(tmp_path / "mine.yaml"))
    assert code == 1 and "action_noise" in err and path in err


@pytest.mark.long
@pytest.mark.parametrize(
    "named", ["tests.networks.Features", '{"class_path": "tests.networks.Features", "init_args": {"width": 3}}']
)
def test_record_runs_no_network_that_a_checkpoint_alone_names(rl, tmp_path, named):
    words = ["--config", "ppo/cartpole.yaml", "--model.features_extractor", named]
    assert rl("fit", *words, *SMALL, "--data.total_timesteps=256")[0] == 0
    folder = next(tmp_path.glob("logs/*/version_0"))
    checkpoint = ["--ckpt_path", str(folder / "checkpoints/last.ckpt")]
    code, _, err = rl("record", "--config", "ppo/cartpole.yaml", *checkpoint)
    assert code == 1 and "must not choose what code runs" in err
    assert "features_extractor=tests.networks.Features" in err and "--model.features_extractor" in err
    for words_of_the_user in (words, ["--config", str(folder / "config.yaml")]):
        code, _, err = rl("record", *words_of_the_user, *checkpoint)
        assert code == 0, err


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_the_config_that_a_run_recorded_is_a_config(rl, trained, command):
    """It holds every argument of ``fit``, those of checkpoints among them, which evaluations do not have."""
    recorded = trained / "config.yaml"
    assert "checkpoint:" in recorded.read_text("utf-8")
    checkpoint = [] if command == "fit" else ["--ckpt_path", str(trained / "checkpoints/last.ckpt")]
    code, out, err = rl(command, "--config", str(recorded), *checkpoint)
    assert not code, err
    assert {"fit": "last checkpoint", "predict": "written to episodes.csv"}.get(command, "mean_reward") in out


def test_a_checkpoint_without_its_config_is_told_where_that_is(rl, trained):
    code, _, err = rl("test", "--ckpt_path", str(trained / "checkpoints/last.ckpt"))
    assert code == 1
    says = "no model is given; the settings of the checkpoint's run are in its config: add --config"
    assert f"{says} {trained / 'config.yaml'}" in err


@pytest.mark.long
def test_a_new_run_does_not_overwrite_a_named_one(rl):
    named = ["--config", "ppo/cartpole.yaml", *SMALL, "--trainer.logger.init_args.version=mine"]
    code, _, err = rl("fit", *named)
    assert not code, err
    last = next(Path("logs").glob("*/mine/checkpoints/last.ckpt"))
    before = last.read_bytes()
    for again in (named, ["--config", str(last.parents[1] / "config.yaml")]):
        code, _, err = rl("fit", *again)
        assert code == 1 and "mine holds a run, which a new one would overwrite; continue it with --resume" in err
    assert last.read_bytes() == before
    code, out, err = rl("fit", *named, "--resume", "--data.total_timesteps", "1536")
    assert not code and "resuming from" in out, err


def test_a_printed_config_is_a_config(rl, capsys):
    code, out, err = rl("fit", "--config", "ppo/cartpole.yaml", *SMALL, "--print_config")
    assert not code, err
    Path("printed.yaml").write_text(out, encoding="utf-8")
    code, out, err = rl("fit", "--config", "printed.yaml")
    assert not code, err
    code, out, err = rl("fit", "--config", "printed.yaml", "--weights_only=false")
    assert code == 1 and "weights_only=False would run whatever code a checkpoint holds" in err


def test_an_evaluation_reads_a_config_without_the_keys_of_fit_and_texts_stay_texts(tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text(
        "model: PPO\ncheckpoint: {keep_all: true}\nresume: true\ndata:\n  class_path: RolloutDataModule\n  init_args: "
        "{n_steps: 1e3, norm_gamma: 1e-1, env_kwargs: {number: 1e-3, text: '1e-3', word: 'no'}}\n"
    )
    words = ["--config", str(config), "--model.gamma", "1", "--data.n_envs=2e0"]
    found = prepared(words, "test", [PPO, RolloutDataModule], tmp_path)
    assert found[2:] == ["--model.gamma", "1", "--data.n_envs=2"]
    arguments = {"n_steps": 1000, "norm_gamma": 0.1, "env_kwargs": {"number": 1e-3, "text": "1e-3", "word": "no"}}
    data = {"class_path": "datamodules.RolloutDataModule", "init_args": arguments}
    assert repr(yaml_load(Path(found[1]).read_text())) == repr({"model": "rl_modules.PPO", "data": data})
    assert "keep_all" in Path(prepared(words, "fit", [PPO], tmp_path)[1]).read_text()


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_config_yaml_of_the_users_stays_as_it_is(rl, trained, command):
    """Evaluations, and a training without a logger, have no folder to themselves in which they may write one."""
    Path("config.yaml").write_text("model: QLearning\n", encoding="utf-8")
    checkpoint = [] if command == "fit" else ["--ckpt_path", str(trained / "checkpoints/last.ckpt")]
    code, _, err = rl(command, "--config", "ppo/cartpole.yaml", *SMALL, "--trainer.logger=false", *checkpoint)
    assert not code, err
    assert Path("config.yaml").read_text(encoding="utf-8") == "model: QLearning\n"


def test_resume_goes_on_from_the_checkpoint(rl, trained):
    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    more = [*SMALL, "--seed_everything", "5", "--data.total_timesteps", "1536"]
    code, out, _ = rl("fit", "--config", "ppo/cartpole.yaml", *more, "--ckpt_path", checkpoint)
    assert code == 0
    assert "1,536 (512 since the run resumed) in" in out


def test_list_copy_and_help_load_no_lightning(tmp_path):
    script = (
        "import sys; from recipes.cli import main; main(['list']); main(['copy', 'ppo/cartpole.yaml', 'mine.yaml']); "
        "main(['--help']); main(['--version']); "
        "assert not {'torch', 'lightning', 'gymnasium', 'numpy', 'jsonargparse'} & set(sys.modules), 'heavy import'; "
        "main(['completion', 'bash']); assert not {'torch', 'lightning'} & set(sys.modules), 'heavy import'"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ppo/cartpole.yaml" in done.stdout
    assert "balances the pole" in done.stdout
    assert "rl fit --config ppo/cartpole.yaml" in done.stdout
    assert (tmp_path / "mine.yaml").read_text() == (configs.CONFIGS / "ppo/cartpole.yaml").read_text()


@pytest.mark.parametrize("command", ["export", "serve", "list", "copy", "doctor", "learn", "completion"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_a_command_without_a_run_explains_itself(rl, command, option):
    code, out, err = rl(command, option)
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: rl {command}")


def test_help_of_export_and_serve_names_every_option(rl):
    named = {
        "export": ["ckpt_path", "output", "adapters", "push_to_hub", "model"],
        "serve": [
            "model",
            "engine",
            "dtype",
            "host",
            "port",
            "token_file",
            "gpu_memory_utilization",
            "max_rows_in_flight",
        ],
    }
    for command, options in named.items():
        _, out, _ = rl(command, "--help")
        assert re.findall(r"^  --(\w+)", out, re.MULTILINE) == options


def test_recipe_runs_its_default_config_and_layers_others(rl):
    Path("mine.yaml").write_text("model:\n  init_args:\n    gamma: 0.5\n")
    code, out, _ = rl("fit", "--print_config", default_config="ppo/cartpole.yaml")
    assert code == 0
    assert "gamma: 0.98" in out
    code, out, _ = rl("fit", "--config", "ppo/cartpole.yaml", "--config", "mine.yaml", "--print_config")
    assert code == 0
    assert "gamma: 0.5" in out
    assert "gae_lambda: 0.8" in out


def test_optimizer_and_scheduler_from_the_command_line(rl):
    code, _, err = rl(
        "fit", "--config", "ppo/cartpole.yaml", *SMALL, "--model.learning_rate", "null", "--model.optimizer", "AdamW",
        "--model.optimizer.lr", "3e-4", "--model.lr_scheduler", "StepLR", "--model.lr_scheduler.step_size", "2",
        "--model.lr_scheduler.gamma", "0.5"
    )  # fmt: skip
    assert code == 0, err
    checkpoint = torch.load(next(Path().glob("logs/*/version_0/checkpoints/last.ckpt")), weights_only=True)
    group = checkpoint["optimizer_states"][0]["param_groups"][0]
    assert group["weight_decay"] == 0.01  # AdamW's own default
    assert group["lr"] == pytest.approx(3e-4 * 0.5**2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fitt"], "unknown command 'fitt'"),
        (["fit"], "no model is given; name one with --config"),
        (["fit", "--model", "PPO"], "no data is given; name one with --config"),
        (["fit", "--config", "ppo/cartpoel.yaml"], "'ppo/cartpoel.yaml' .* did you mean ppo/cartpole.yaml"),
        (
            ["fit", "--config", "ppo/cartpole.yaml", "--model.gama", "1"],
            "unknown option 'model.gama'; did you mean gamma",
        ),
        (
            ["fit", "--config", "ppo/cartpole.yaml", "--data.n_env", "1"],
            "unknown option 'data.n_env'; did you mean n_envs",
        ),
        (
            ["fit", "--config", "ppo/cartpole.yaml", "--model", "PPOO"],
            "model class 'PPOO' is unknown; .* did you mean PPO",
        ),
        (
            ["fit", "--config", "ppo/cartpole.yaml", "--data.n_envs", "x"],
            "data.n_envs='x' must be a number",
        ),
        (
            ["fit", "--config", "ppo/cartpole.yaml", "--trainer.max_epochs", "x"],
            "trainer.max_epochs='x' must be a number",
        ),
        (["fit", "--config", "ppo/cartpole.yaml", "--data.batch_size", "1000"], "batch_size=1000 must lie"),
        (["fit", "--config", "ppo/cartpole.yaml", "--model.gamma", "7"], "gamma=7.0 must lie in"),
        (["fit", "--config", "ppo/cartpole.yaml", "--data.env_id", "CartPol-v1"], "did you mean CartPole-v1"),
        (["fit", "--config", "ppo/cartpole.yaml", "--ckpt_path", "none.ckpt"], "ckpt_path='none.ckpt' is not a file"),
        (["fit", "--model", "PPO", "--data.env_id", "CartPole-v1"], "no data is given; .* --data CLASS"),
        (["predict", "--config", "ppo/cartpole.yaml", "--output", "x.txt"], "must end in .csv or .jsonl"),
        (
            ["fit", "--config", "ppo/cartpole.yaml", "--data.env_id", "tests.datamodules.envs:Odd"],
            "can't act in .*Sequence",
        ),
        (["copy", "ppo/cartpole.yaml"], "rl copy: the following arguments are required: target"),
        (["copy", "ppo/nothing.yaml", "x.yaml"], "neither a file nor an installed config"),
    ],
)
def test_bad_input_gets_one_sentence_and_writes_nothing(rl, arguments, message):
    code, out, err = rl(*arguments)
    assert code != 0
    assert len(err.strip().splitlines()) == 1, err
    assert re.search(message, err), err
    assert "Traceback" not in out + err
    assert not list(Path().rglob("*"))


@pytest.mark.parametrize(("line", "kind"), [
    ("def __init__(self, **arguments):\n        raise ValueError('mine')", ValueError),
    ("def on_train_start(self):\n        open('mine.txt')", FileNotFoundError),
    ("def training_step(self, batch, batch_idx):\n        self.log('mine', {'a': 'x'})", ValueError),  # Lightning's
], ids=["constructor", "file", "Lightning"])  # fmt: skip
def test_an_error_of_a_user_s_code_keeps_its_traceback(line, kind, tmp_path, monkeypatch):
    """Also where the parser or Lightning made a sentence of it: only the traceback names file and line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = f"its_own_{len(line)}"
    (tmp_path / f"{module}.py").write_text(f"from rl_modules import PPO\n\n\nclass Mine(PPO):\n    {line}\n")
    with pytest.raises(kind, match="mine") as raised:
        main(["fit", "--config", "ppo/cartpole.yaml", "--model", f"{module}.Mine", "--data.total_timesteps=256"])
    assert any(place.path.name == f"{module}.py" for place in raised.traceback)


@pytest.mark.long
def test_nan_reward_keeps_the_last_good_checkpoint(rl):
    code, _, err = rl(
        "fit", "--config", "ppo/cartpole.yaml", "--data.env_id", "tests.datamodules.envs:Counter", "--data.env_kwargs",
        "{bad_at: 300, length: 1000}", "--data.eval_freq", "0", "--checkpoint.interval_s", "0"
    )  # fmt: skip
    assert code == 1
    assert "NaN or infinite reward in row" in err
    checkpoint = torch.load(next(Path().glob("logs/*/version_0/checkpoints/last.ckpt")), weights_only=True)
    # Each environment had delivered 9 rollouts of 32 good rows before its 300th; how many of them were written is a
    # matter of the clock.
    assert checkpoint["RolloutDataModule"]["num_timesteps"] in [k * 256 for k in range(1, 10)]
    assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values())


@pytest.mark.long
def test_a_new_run_does_not_add_its_curves_to_those_of_a_named_one(rl):
    """A trial of a sweep keeps its curves and config, and no checkpoints."""
    code, _, err = rl("fit", "--config", "ppo/cartpole.yaml", *SMALL, "--trainer.logger.init_args.version=mine",
                      "--trainer.enable_checkpointing=false")  # fmt: skip
    assert not code, err
    recorded = next(Path("logs").glob("*/mine/config.yaml"))
    curves = sorted(recorded.parent.glob("events.*"))
    code, _, err = rl("fit", "--config", str(recorded))
    assert code == 1 and "mine holds a run, which a new one would overwrite; continue it with --resume" in err
    assert sorted(recorded.parent.glob("events.*")) == curves
    code, _, err = rl("fit", "--config", str(recorded), "--trainer.logger.init_args.version=null")
    assert not code, err


def test_learn_copies_the_notebooks_and_keeps_changed_ones(tmp_path: Path) -> None:
    folder = tmp_path / "guide"
    main(["learn", "--folder", str(folder), "--copy_only"])
    ladder = Path(__file__).parents[3] / "docs" / "ladder"
    notebooks = {file.name for file in ladder.glob("*.ipynb")}
    assert len(notebooks) >= 15 and notebooks == {file.name for file in folder.glob("*.ipynb")}
    changed = folder / "01_dynamic_programming.ipynb"
    changed.write_text("mine")
    (folder / "helpers.py").unlink()
    main(["learn", "--folder", str(folder), "--copy_only"])
    assert changed.read_text() == "mine" and (folder / "helpers.py").is_file()
