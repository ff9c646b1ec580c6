"""``rl sweep``: results, pruning, resuming, errors."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes import configs
from recipes.cli import main
from recipes.cli.sweep_file import read
from recipes.cli.sweep_spaces import SPACES
from recipes.pipeline import checked
from rl_modules.common.errors import UsageError

optuna = pytest.importorskip("optuna")

sweep_module = pytest.importorskip("recipes.cli.sweep")

SMALL = {
    "config": "ppo/cartpole.yaml",
    "n_trials": 2,
    "seeds": 2,
    "startup_trials": 2,
    "warmup_evaluations": 1,
    "prune": False,
    "search": {
        "model.learning_rate": {"log": ["1e-4", 1e-2]},
        "model.net_arch": {"values": [[8], [16, 16]]},
        "data.n_envs": {"values": [4, 8]},
    },
}
RUN = ["--data.total_timesteps=512", "--data.n_steps=16", "--data.batch_size=64", "--data.n_epochs=1",
       "--data.eval_freq=128", "--data.n_eval_episodes=2", "--data.n_test_episodes=2",
       "--checkpoint.interval_s=0", "--checkpoint.max_share=1"]  # fmt: skip


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """Writes a sweep's file and runs it; returns the exit code, what was printed, and the error."""
    monkeypatch.chdir(tmp_path)

    def run(*words, **changes):
        Path("sweep.yaml").write_text(yaml.safe_dump({**SMALL, **changes}))
        code = 0
        try:
            main(["sweep", "sweep.yaml", *RUN, *words])
        except SystemExit as exit_:
            code = exit_.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


def trials(folder=Path()):
    storage = f"sqlite:///{folder / 'logs/sweep-ppo-cartpole/sweep.db'}"
    return optuna.load_study(study_name="ppo-cartpole", storage=storage).trials


def outcome(folder=Path()):
    return [(t.params, t.value, t.state.name, t.intermediate_values, t.user_attrs) for t in trials(folder)]


@pytest.mark.long
def test_a_sweep_runs_its_seeds_and_keeps_one_row_per_trial(sweep):
    code, out, err = sweep()
    assert code == 0, err
    found = trials()
    assert len(found) == 2
    folder = Path("logs/sweep-ppo-cartpole")
    for trial in found:
        # Two seeds from 1000 up, whose mean is the trial's value.
        assert trial.value == pytest.approx((trial.user_attrs["seed_1000"] + trial.user_attrs["seed_1001"]) / 2)
        assert 1e-4 <= trial.params["model.learning_rate"] <= 1e-2
        run = folder / f"runs/trial_{trial.number:04}/seed_1001"
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert config["model"]["init_args"]["learning_rate"] == trial.params["model.learning_rate"]
        assert config["data"]["init_args"]["n_envs"] == int(trial.params["data.n_envs"])
        assert str(config["model"]["init_args"]["net_arch"]) == trial.params["model.net_arch"]
        assert config["data"]["init_args"]["seed"] == 1001
        assert not (run / "checkpoints").exists()
        row = EventAccumulator(str(folder / f"hparams/trial_{trial.number:04}")).Reload()
        assert row.Scalars("eval/mean_reward")[0].value == pytest.approx(trial.value)
        assert any("hparams" in tag for tag in row.summary_metadata)
        # The curve of the mean over the seeds that are done: four evaluations of each.
        steps = sorted(trial.intermediate_values)
        assert len(steps) == 8
        curves = [trial.user_attrs["curve_1000"], trial.user_attrs["curve_1001"]]
        assert trial.intermediate_values[steps[1]] == curves[0][1]
        assert trial.intermediate_values[steps[5]] == pytest.approx((curves[0][1] + curves[1][1]) / 2)
    assert len({trial.params["model.learning_rate"] for trial in found}) == 2
    best = max(found, key=lambda trial: trial.value)
    assert f"--model.learning_rate={best.params['model.learning_rate']}" in out.splitlines()[-1]

    # A finished sweep has nothing to do, and more trials go on after the old ones.
    before = outcome()
    assert sweep()[0] == 0
    assert outcome() == before
    assert sweep("--n_trials", "3")[0] == 0
    assert outcome()[:2] == before
    assert len(outcome()) == 3


@pytest.mark.slow
def test_a_sweep_that_stopped_within_a_run_ends_as_one_that_did_not(sweep, monkeypatch, tmp_path):
    from recipes.cli import sweep as module

    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    assert sweep()[0] == 0
    monkeypatch.chdir(tmp_path)

    original = module.Judge.on_validation_end

    def crash(judge, trainer, pl_module):
        original(judge, trainer, pl_module)
        if judge.trial.number == 1 and len(judge.before) == 1 and len(judge.values) == 3:
            raise RuntimeError("the machine is gone")

    monkeypatch.setattr(module.Judge, "on_validation_end", crash)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        sweep()
    assert [trial.state.name for trial in trials()] == ["COMPLETE", "RUNNING"]
    assert (tmp_path / "logs/sweep-ppo-cartpole/runs/trial_0001/seed_1001/checkpoints/last.ckpt").exists()
    monkeypatch.setattr(module.Judge, "on_validation_end", original)
    code, out, _ = sweep()
    assert code == 0
    assert "trial 1: resumed" in out
    assert outcome() == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_sweep_ends_as_one_that_was_not(sweep, tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    assert sweep()[0] == 0
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(yaml.safe_dump(SMALL))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    for trial in range(2):
        process = subprocess.Popen([sys.executable, "-m", "recipes", "sweep", "sweep.yaml", *RUN], env=environment)
        while not Path(f"logs/sweep-ppo-cartpole/runs/trial_{trial:04}/seed_1000/checkpoints/last.ckpt").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert sweep()[0] == 0
    assert outcome() == outcome(tmp_path / "whole")


@pytest.mark.long
def test_a_trial_that_is_worse_than_the_others_were_is_pruned(sweep, monkeypatch):
    from recipes.cli import sweep as module

    original = module.Judge.on_validation_end

    def judged(judge, trainer, pl_module):
        metrics = {**trainer.callback_metrics, "eval/mean_reward": torch.tensor(-float(judge.trial.number))}
        with monkeypatch.context() as patch:
            patch.setattr(L.Trainer, "callback_metrics", property(lambda _: metrics))
            original(judge, trainer, pl_module)

    monkeypatch.setattr(module.Judge, "on_validation_end", judged)
    code, out, _ = sweep(prune=True, seeds=1, n_trials=3)
    assert code == 0
    assert [trial.state.name for trial in trials()] == ["COMPLETE", "COMPLETE", "PRUNED"]
    # The warm-up is the first evaluation, index 0.
    assert len(trials()[2].intermediate_values) == 2
    assert "pruned at evaluation 2 of seed 1000" in out


@pytest.mark.long
@pytest.mark.parametrize(("changes", "sentence"), [
    ({"search": {}}, "search={} must map arguments to ranges"),
    ({"search": {"model.gamma": [0.9, 1]}}, "search.model.gamma=[0.9, 1] must have one of the keys uniform"),
    ({"search": {"model.gamma": {"logs": [0.9, 1]}}}, "did you mean log?"),
    ({"search": {"model.gamma": {"log": [0, 1]}}}, "log=[0, 1] must be two positive numbers"),
    ({"search": {"model.gamma": {"log": [0.1, 0.01]}}}, "[0.1, 0.01] must be two positive numbers, the smaller first"),
    ({"search": {"model.gamma": {"uniform": [1, 0]}}}, "uniform=[1, 0] must be two numbers"),
    ({"search": {"model.gamma": {"int": [0.5, 1]}}}, "int=[0.5, 1] must be two whole numbers"),
    ({"search": {"data.n_steps": {"pow2": [16, 100]}}}, "pow2=[16, 100] must be two powers of two"),
    ({"search": {"data.n_steps": {"pow2": [0, 16]}}}, "pow2=[0, 16] must be two powers of two"),
    ({"search": {"model.gamma": {"values": []}}}, "values=[] must be a list"),
    ({"n_trial": 3}, "takes no argument 'n_trial'; did you mean n_trials"),
    ({"n_trials": "many"}, "n_trials='many' must be a number"),
    ({"seeds": 0}, "seeds=0 must be at least 1"),
    ({"mode": "best"}, "mode='best' must be one of max, min"),
    ({"finalists": -1}, "finalists=-1 must be at least 0"),
    ({"finalists": 2, "final_seeds": 0}, "final_seeds=0 must be at least 1"),
    ({"search": {"data.seed": {"values": [1, 2]}}}, "data.seed can't be given: a trial runs with the seeds from"),
    ({"config": "ppo/cartpol.yaml"}, "did you mean ppo/cartpole.yaml"),
    ({"config": None}, "config=None must be the config"),
    ({"search": {"model.gama": {"log": [0.9, 1]}}, "n_trials": 3},
     "search: unknown option 'model.gama'; did you mean gamma?"),
    ({"monitor": "eval/mean", "seeds": 1, "n_trials": 3}, "monitor='eval/mean' is not among what"),
    ({"objective": "eval/mean", "seeds": 1, "n_trials": 3}, "objective='eval/mean' is no curve of the run"),
])  # fmt: skip
def test_a_wrong_file_is_one_sentence(sweep, changes, sentence):
    code, _, err = sweep(**changes)
    assert code == 1
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["--data.seed", "7"], ["--seed_everything=7"]], ids=" ".join)
def test_a_seed_for_all_runs_is_refused(sweep, words):
    code, _, err = sweep(*words)
    assert code == 1
    assert f"{words[0].lstrip('-').partition('=')[0]} can't be given: a trial runs with the seeds from" in err


def test_a_sweep_without_a_result_fails(sweep, monkeypatch):
    def diverges(*arguments):
        raise FloatingPointError("the weights are NaN")

    monkeypatch.setattr(sweep_module, "run_once", diverges)
    code, out, err = sweep(n_trials=2)
    assert code == 1
    assert "trial 1" in out and "the weights are NaN" in out
    assert "no trial of the sweep has a result" in err


@pytest.mark.slow
def test_processes_that_begin_a_sweep_together_share_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(yaml.safe_dump({**SMALL, "seeds": 1, "n_trials": 3}))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "recipes", "sweep", "sweep.yaml", *RUN]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err.decode()
    assert [trial.state.name for trial in trials()] == ["COMPLETE"] * 3


@pytest.mark.long
def test_a_trial_trains_in_one_process(sweep):
    code, _, err = sweep("--trainer.devices=2", "--trainer.accelerator=cpu", n_trials=3)
    assert code == 1
    assert "trainer.devices=2: a trial of a sweep trains in one process; leave it out" in err


def finals():
    storage = "sqlite:///logs/sweep-ppo-cartpole/sweep.db"
    attributes = optuna.load_study(study_name="ppo-cartpole", storage=storage).user_attrs
    return {name: result for name, result in attributes.items() if name.startswith("final_")}


def row(number):
    """Results of a trial in the HParams view."""
    events = EventAccumulator(f"logs/sweep-ppo-cartpole/hparams/trial_{number:04}").Reload()
    return {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_the_best_trials_run_again_on_seeds_that_the_search_has_not_seen(sweep, capsys):
    changes = {"n_trials": 3, "seeds": 1, "finalists": 2, "final_seeds": 2}
    code, out, err = sweep(**changes)
    assert code == 0, err
    best = sorted(trials(), key=lambda trial: trial.value, reverse=True)[:2]
    found = finals()
    assert set(found) == {f"final_{trial.number}_{seed}" for trial in best for seed in (1001, 1002)}
    # A result is that of the same settings and seed by hand.
    words = [f"--{name}={value}" for name, value in best[0].params.items()]
    main(["fit", "--config", "ppo/cartpole.yaml", *RUN, *words, "--seed_everything", "1002"])
    by_hand = EventAccumulator("logs/PPO-CartPole-v1/version_0").Reload()
    assert by_hand.Scalars("eval/mean_reward")[-1].value == found[f"final_{best[0].number}_1002"]
    assert not list(Path("logs/sweep-ppo-cartpole/runs").glob("final_*/seed_*/checkpoints"))
    # They alone decide.
    means = {trial.number: sum(found[f"final_{trial.number}_{seed}"] for seed in (1001, 1002)) / 2 for trial in best}
    winner = max(best, key=lambda trial: means[trial.number])
    for name, value in winner.params.items():
        assert f"--{name}={value}" in out.splitlines()[-1].replace("'", "")
    for trial in best:
        assert f"trial {trial.number}: eval/mean_reward {means[trial.number]:.6g} on seeds 1001 to 1002" in out
        assert row(trial.number)["final/eval/mean_reward"] == pytest.approx(means[trial.number])
        assert row(trial.number)["eval/mean_reward"] == pytest.approx(trial.value)
    (other,) = {trial.number for trial in trials()} - {trial.number for trial in best}
    assert "final/eval/mean_reward" not in row(other)

    # A finished sweep runs nothing; more seeds come after the old ones.
    capsys.readouterr()
    assert "finalist" not in sweep(**changes)[1]
    out = sweep(**{**changes, "final_seeds": 3})[1]
    assert out.count("finalist") == 2 and out.count("seed 1003") == 2
    assert {name: finals()[name] for name in found} == found


def by_setting(monkeypatch, run_once):
    """Runs take no time: a result depends on the drawn settings and the seed alone."""

    def run(settings, chosen, seed, folder, judge=None):
        if judge is None:
            return run_once(chosen, seed)
        judge.values.append(float(chosen["model.learning_rate"]))
        return float(chosen["model.learning_rate"])

    monkeypatch.setattr(sweep_module, "run_once", run)
    monkeypatch.setattr("recipes.cli.sweep.run_once", run)


FINALS = {"n_trials": 4, "seeds": 1, "finalists": 3, "final_seeds": 2}


def test_a_finalist_that_fails_does_not_win_and_costs_the_others_nothing(sweep, monkeypatch):
    def diverges(chosen, seed):
        rate = float(chosen["model.learning_rate"])
        if rate == max(trial.value for trial in trials()) and seed == 1002:
            raise FloatingPointError("the weights are NaN")
        return -rate

    by_setting(monkeypatch, diverges)
    code, out, err = sweep(**FINALS)
    assert code == 0, err
    ordered = sorted(trials(), key=lambda trial: trial.value, reverse=True)
    assert "failed: the weights are NaN" in out and finals()[f"final_{ordered[0].number}_1002"] == "the weights are NaN"
    # The second round has the opposite order: the third of the search, the last finalist, wins.
    assert f"--model.learning_rate={ordered[2].params['model.learning_rate']}" in out.splitlines()[-1]
    assert f"trial {ordered[0].number}: eval/mean_reward {-ordered[0].value:.6g} on seeds" not in out


def test_the_last_of_many_finalists_may_win_where_the_others_fail(sweep, monkeypatch):
    def fails(chosen, seed):
        if float(chosen["model.learning_rate"]) > min(trial.value for trial in trials()):
            raise FloatingPointError("the weights are NaN")
        return 1.0

    by_setting(monkeypatch, fails)
    code, out, err = sweep(n_trials=7, seeds=1, finalists=7, final_seeds=1)
    assert code == 0, err
    last = min(trials(), key=lambda trial: trial.value)
    assert f"--model.learning_rate={last.params['model.learning_rate']}" in out.splitlines()[-1]


def test_the_second_round_goes_on_where_it_was_stopped(sweep, monkeypatch):
    ran = []

    def stops(chosen, seed):
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append((chosen["model.learning_rate"], seed))
        return float(seed)

    by_setting(monkeypatch, stops)
    assert sweep(**FINALS)[0] == 130
    assert len(finals()) == 3
    by_setting(monkeypatch, lambda chosen, seed: ran.append((chosen["model.learning_rate"], seed)) or float(seed))
    assert sweep(**FINALS)[0] == 0
    assert len(ran) == len(set(ran)) == len(finals()) == 6
    # The seeds come one after another, so that a round that is stopped has the finalists on the same seeds.
    assert [seed for _, seed in ran] == [1001] * 3 + [1002] * 3


def test_a_final_run_of_another_process_is_waited_for(sweep, monkeypatch):
    by_setting(monkeypatch, lambda chosen, seed: float(seed))
    assert sweep(**{**FINALS, "finalists": 0})[0] == 0
    best = max(trials(), key=lambda trial: trial.value).number
    taken, others_done, ran = threading.Event(), threading.Event(), []

    def other_process():
        with sweep_module.locked(Path(f"logs/sweep-ppo-cartpole/final_{best:04}_1001.lock")) as is_ours:
            assert is_ours
            taken.set()
            others_done.wait(60)
            storage = "sqlite:///logs/sweep-ppo-cartpole/sweep.db"
            optuna.load_study(study_name="ppo-cartpole", storage=storage).set_user_attr(f"final_{best}_1001", 5000.0)

    def run(chosen, seed):
        ran.append(seed)
        if len(ran) == 5:
            others_done.set()
        return float(seed)

    by_setting(monkeypatch, run)
    thread = threading.Thread(target=other_process)
    thread.start()
    taken.wait(60)
    code, out, err = sweep(**FINALS)
    thread.join()
    assert code == 0, err
    assert sorted(ran) == [1001] * 2 + [1002] * 3
    assert f"trial {best}: eval/mean_reward {(5000 + 1002) / 2:.6g} on seeds 1001 to 1002" in out


def test_a_sweep_has_help(capsys):
    main(["sweep", "--help"])
    assert "usage: rl sweep [-h] [--n_trials N] FILE" in capsys.readouterr().out


@pytest.mark.long
def test_a_sweep_keeps_its_settings(sweep):
    changes = {"n_trials": 1, "seeds": 1}
    assert sweep(**changes)[0] == 0
    code, _, err = sweep(**{**changes, "first_seed": 5})
    assert code == 1
    assert "has a sweep with other settings" in err


@pytest.mark.long
def test_an_edited_config_is_another_sweep(sweep):
    main(["copy", "ppo/cartpole.yaml", "mine.yaml"])
    changes = {"config": "mine.yaml", "name": "ppo-cartpole", "n_trials": 1, "seeds": 1}
    assert sweep(**changes)[0] == 0
    text = Path("mine.yaml").read_text()
    Path("mine.yaml").write_text(f"# another comment\n{text}")
    assert sweep(**{**changes, "n_trials": 2})[0] == 0
    assert "gamma: 0.98" in text
    Path("mine.yaml").write_text(text.replace("gamma: 0.98", "gamma: 0.9"))
    code, _, err = sweep(**{**changes, "n_trials": 3})
    assert code == 1 and "its config had another text" in err and len(trials()) == 2


@pytest.mark.long
def test_a_diverged_language_model_is_a_failed_trial(sweep, monkeypatch):
    def diverges(*args):
        raise FloatingPointError("the model's logits are NaN: training has diverged")

    run_seed = sweep_module.run_seed
    monkeypatch.setattr(sweep_module, "run_seed", lambda *args: (diverges if args[1].number == 0 else run_seed)(*args))
    code, out, err = sweep(seeds=1)
    assert code == 0, err
    assert "failed: the model's logits are NaN" in out
    assert [trial.state.name for trial in trials()] == ["FAIL", "COMPLETE"]


@pytest.mark.long
def test_a_trial_that_another_process_finished_meanwhile_is_not_run_again(sweep, monkeypatch):
    """Two trials are unfinished; while this process takes the first, the process of the second finishes that."""

    def interrupted(*args):
        raise KeyboardInterrupt

    def runs_while_another_does(settings, trial, *args):
        if trial.number == 0:
            other = optuna.trial.Trial(trial.study, trials()[1]._trial_id)
            other.set_user_attr("seed_1000", 1.0)
            trial.study.tell(other, 1.0)
        return 2.0

    monkeypatch.setattr(sweep_module, "run_seed", interrupted)
    assert sweep(seeds=1)[0] == 130
    study = optuna.load_study(study_name="ppo-cartpole", storage="sqlite:///logs/sweep-ppo-cartpole/sweep.db")
    study.ask()
    monkeypatch.setattr(sweep_module, "run_seed", runs_while_another_does)
    code, _, err = sweep(seeds=1)
    assert code == 0, err
    assert [(trial.state.name, trial.value) for trial in trials()] == [("COMPLETE", 2.0), ("COMPLETE", 1.0)]


def ends(sweep, end):
    """The first or last values of a sweep's ranges."""
    return {name: found.choices[end] if hasattr(found, "choices") else (found.low, found.high)[end]
            for name, found in sweep.ranges.items()}  # fmt: skip


def test_the_installed_sweeps_name_arguments_that_exist(monkeypatch, tmp_path):
    """Each range's ends parse with the config, through the same command line."""
    monkeypatch.chdir(tmp_path)
    assert configs.sweeps()
    for name in configs.sweeps():
        assert f"rl sweep {name}" in "\n".join(configs.header(name))
        sweep = read(name, [])
        for end in (0, -1):
            words = [f"--{argument}={value}" for argument, value in ends(sweep, end).items()]
            configs_of = [word for config in sweep.config for word in ("--config", config)]
            with pytest.raises(SystemExit) as exit_:
                main(["fit", *configs_of, *words, "--print_config"])
            assert exit_.value.code in (0, None)


#: A config per algorithm that has default ranges.
OF_ALGORITHM = {
    "PPO": "ppo/cartpole.yaml",
    "A2C": "a2c/cartpole.yaml",
    "TRPO": "trpo/cartpole.yaml",
    "DQN": "dqn/cartpole.yaml",
    "SAC": "sac/pendulum.yaml",
    "TD3": "td3/pendulum.yaml",
    "TQC": "tqc/pendulum.yaml",
}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", SPACES)
def test_default_ranges_name_arguments_that_exist_and_values_that_they_take(algorithm, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sweep = read(OF_ALGORITHM[algorithm], [])
    assert sweep.config == [OF_ALGORITHM[algorithm]] and list(sweep.search) == list(SPACES[algorithm])
    sweep_module.check(sweep)
    for end in (0, -1):
        words = [f"--{name}={value}" for name, value in ends(sweep, end).items()]
        checked("fit", ["--config", str(configs.find(OF_ALGORITHM[algorithm])), *words])


@pytest.mark.long
def test_the_page_s_sweeps_run(tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[3] / "docs" / "how_to" / "sweep.md"
    blocks = re.findall(r"```yaml\n(config:.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        Path("mine.yaml").write_text(re.sub(r"(?m)^(seeds|finalists|final_seeds): \d+", r"\1: 1", block))
        words = ["--n_trials=3", "--data.total_timesteps=256", "--data.eval_freq=128", "--data.n_eval_episodes=1",
                 "--data.n_test_episodes=1"]  # fmt: skip
        main(["sweep", "mine.yaml", *words])
        capsys.readouterr()
        assert [trial.state.name for trial in trials(folder)] == ["COMPLETE"] * 3


@pytest.mark.long
def test_a_config_alone_is_searched_in_its_algorithm_s_ranges(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_module, "run_once", lambda sweep, chosen, *rest: float(chosen["model.learning_rate"]))
    main(["sweep", "ppo/cartpole.yaml", "--n_trials", "2"])
    assert "model.clip_range" in capsys.readouterr().out
    assert [set(trial.params) for trial in trials()] == [set(SPACES["PPO"])] * 2
    with pytest.raises(SystemExit):
        main(["sweep", "sarsa/maze.yaml"])
    assert "only PPO, A2C, TRPO, DQN, SAC, TD3, TQC have default ranges" in capsys.readouterr().err


@pytest.mark.long
def test_a_changed_file_goes_on_after_failed_trials(sweep, monkeypatch):
    def fails(*arguments):
        raise UsageError("batch_size=256 must lie between 1 and n_envs*n_steps=136")

    monkeypatch.setattr(sweep_module, "run_once", fails)
    assert sweep(n_trials=5)[0] == 1
    assert [trial.state.name for trial in trials()] == ["FAIL"] * 3
    monkeypatch.setattr(sweep_module, "run_once", lambda *arguments: 1.0)
    changed = {"n_trials": 2, "mode": "min", "search": {"model.net_arch": {"values": [[4], [5], [6]]}}}
    code, _, err = sweep(**changed)
    assert code == 0, err
    assert [trial.state.name for trial in trials()] == ["COMPLETE"] * 2
    # With a result, another change is refused.
    assert "has a sweep with other settings" in sweep(**{**changed, "mode": "max"})[2]


def test_settings_that_were_drawn_before_run_nothing(sweep, monkeypatch):
    ran = []
    monkeypatch.setattr(sweep_module, "run_once", lambda *given: ran.append(given[2]) or 7.0)
    assert sweep(seeds=1, search={"model.net_arch": {"values": [[8]]}})[0] == 0
    assert ran == [1000] and [trial.value for trial in trials()] == [7.0, 7.0]


@pytest.mark.long
def test_a_trial_that_is_too_large_for_the_gpu_is_a_failed_one(sweep, monkeypatch):
    """Resuming it would end the sweep again."""

    def run(settings, trial, *args):
        if trial.number == 0:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return 1.0

    monkeypatch.setattr(sweep_module, "run_seed", run)
    code, out, err = sweep(seeds=1)
    assert code == 0, err
    assert "failed: CUDA out of memory" in out
    assert [trial.state.name for trial in trials()] == ["FAIL", "COMPLETE"]


@pytest.mark.long
def test_a_run_of_a_sweep_begins_without_the_last_one_s_memory(sweep, monkeypatch):
    seen, alive = [], []

    class Run:
        def __init__(self, words, judge):
            alive.append([run() is not None for run in seen])
            self.itself = self  # as a Trainer, its module and its loops
            seen.append(weakref.ref(self))

    monkeypatch.setattr("recipes.cli.sweep_trials.TrialRun", Run)
    monkeypatch.setattr("recipes.callbacks.curves.points", lambda folder: {"eval/mean_reward": [(0, 1.0)]})
    gc.disable()
    try:
        code, _, err = sweep()
    finally:
        gc.enable()
    assert code == 0, err
    assert alive == [[False] * n for n in range(4)]
