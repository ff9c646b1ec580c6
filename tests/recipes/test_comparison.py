"""Runs side by side: the table, its statistics, and the plot."""

import csv
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import yaml

import recipes
from datamodules import RolloutDataModule
from recipes import compared_runs, comparison
from recipes.cli import main
from rl_modules import PPO
from rl_modules.common.errors import UsageError

pd = pytest.importorskip("pandas")
pytest.importorskip("rliable")


class StopAfter(L.Callback):
    """Ends a run after some epochs, by itself or by an error."""

    def __init__(self, epochs: int, error: Exception | None = None) -> None:
        self.epochs, self.error = epochs, error

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == self.epochs:
            if self.error is not None:
                raise self.error
            trainer.should_stop = True


FINALS = {0.2: [10.0, 40.0, 20.0, 30.0], 0.1: [35.0, 15.0, 50.0, 30.0]}


def write(folder: Path, seed: int, points: list[tuple[int, float]], metric: str = "eval/mean_reward", **other) -> Path:
    """Writes a run as ``rl fit`` leaves it with a CSVLogger."""
    folder.mkdir(parents=True)
    (folder / "hparams.yaml").write_text(yaml.safe_dump({"seed": seed, "gamma": 0.99, **other}), encoding="utf-8")
    with (folder / "metrics.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.DictWriter(file, ["step", "epoch", metric, "time/time_elapsed"])
        rows.writeheader()
        for step, value in points:
            rows.writerow({"step": step, metric: value, "time/time_elapsed": step / 10})
    return folder


@pytest.fixture(autouse=True)
def few_resamples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "bootstrap" not in request.node.name:
        monkeypatch.setattr(comparison, "RESAMPLES", 50)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for clip_range, finals in FINALS.items():
        for seed, final in enumerate(finals):
            number = len(list(tmp_path.glob("PPO-Maze-v0/*")))
            points = [(0, 0.0), (50, final + 5), (100, final)]
            write(tmp_path / "PPO-Maze-v0" / f"version_{number}", seed, points, clip_range=clip_range)
    return tmp_path / "PPO-Maze-v0"


def test_runs_that_differ_in_their_seed_alone_are_one_row(logs: Path) -> None:
    frame = recipes.compare(logs)
    assert frame["clip_range"].tolist() == [0.2, 0.1]
    assert "gamma" not in frame, "equal settings are no column"
    assert frame["seeds"].tolist() == ["0, 1, 2, 3"] * 2 and frame["n"].tolist() == [4, 4]
    assert frame["steps"].tolist() == [100, 100] and frame["seconds"].tolist() == [10.0, 10.0]
    assert frame["final"].tolist() == [np.mean(x) for x in FINALS.values()]
    assert frame["best"].tolist() == [np.mean(x) + 5 for x in FINALS.values()]
    assert frame["worst"].tolist() == [10.0, 15.0]
    assert frame.attrs == {"metric": "eval/mean_reward", "mode": "max"}


def test_interquartile_mean_and_probability_of_improvement_equal_their_definitions(logs: Path) -> None:
    frame = recipes.compare(logs)
    middle = [np.mean(sorted(x)[1:3]) for x in FINALS.values()]
    assert frame["iqm"].tolist() == middle
    old, new = FINALS.values()
    above = np.mean([1.0 if n > o else 0.5 if n == o else 0.0 for n in new for o in old])
    assert frame["p_above_first"].tolist() == [0.5, pytest.approx(above)]
    # A lower value is an improvement: the same pairs, the other way around.
    assert recipes.compare(logs, mode="min")["p_above_first"][1] == pytest.approx(1 - above)
    assert recipes.compare(logs, mode="min")["worst"].tolist() == [40.0, 50.0]


def test_the_interval_is_the_percentile_bootstrap_over_seeds() -> None:
    from scipy.stats import bootstrap

    values = np.random.default_rng(3).normal(size=(6, 4)) * np.array([1.0, 2.0, 5.0, 0.0])
    mean, low, high = comparison.interval(values)
    other = bootstrap((values[:, :3],), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(0))
    np.testing.assert_allclose(mean, values.mean(0))
    # Two bootstraps of 2,000 and 20,000 resamples: their ends differ by a few hundredths of the spread.
    np.testing.assert_allclose(low[:3], other.confidence_interval.low, atol=0.25)
    np.testing.assert_allclose(high[:3], other.confidence_interval.high, atol=0.25)
    assert low[3] == high[3] == mean[3] == 0


def test_intervals_leave_the_global_generator_and_repeat() -> None:
    values = np.arange(5.0)
    np.random.seed(7)  # noqa: NPY002
    expected = np.random.RandomState(7).random_sample(3)
    first = comparison.interval(values)
    np.testing.assert_array_equal(np.random.random_sample(3), expected)  # noqa: NPY002
    assert comparison.interval(values) == first


def test_two_seeds_have_a_mean_and_no_interval(logs: Path) -> None:
    frame = recipes.compare(logs / "version_0", logs / "version_1")
    assert frame["final"].tolist() == [25.0]
    assert frame[["final_low", "final_high", "iqm", "p_above_first"]].isna().all(axis=None)


def test_a_loss_improves_downwards(tmp_path: Path) -> None:
    write(tmp_path / "SFT-x" / "version_0", 0, [(1, 3.0), (2, 1.0), (3, 2.0)], "eval/loss")
    frame = recipes.compare(tmp_path)
    assert (frame["best"][0], frame["final"][0], frame.attrs["mode"]) == (1.0, 2.0, "min")


def test_a_pattern_names_runs_and_the_last_of_equal_runs_counts(logs: Path) -> None:
    assert recipes.compare(f"{logs}/version_[01]")["n"].tolist() == [2]
    write(logs / "version_10", 0, [(100, 70.0)], clip_range=0.2)  # seed 0 again, after version_9
    frame = recipes.compare(logs)
    assert frame["n"].tolist() == [4, 4]
    assert frame["final"][0] == np.mean([70.0, 40.0, 20.0, 30.0])


def test_two_algorithms_are_told_apart_by_name_and_shared_settings(tmp_path: Path) -> None:
    write(tmp_path / "PPO-Maze-v0" / "version_0", 0, [(1, 1.0)], clip_range=0.2, n_steps=8)
    write(tmp_path / "A2C-Maze-v0" / "version_0", 0, [(1, 2.0)], n_steps=5)
    frame = recipes.compare(tmp_path)
    assert frame["run"].tolist() == ["A2C-Maze-v0", "PPO-Maze-v0"]
    assert frame["n_steps"].tolist() == [5, 8] and "clip_range" not in frame


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"metric": "eval/mean_rewards"},
            "metric='eval/mean_rewards' is not logged by all 8 runs; did you mean eval/m",
        ),
        ({"mode": "up"}, "mode='up' must be max or min"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(logs: Path, change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recipes.compare(logs, **change)


def test_a_folder_without_runs_or_curves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent holds no run"):
        recipes.compare(tmp_path / "absent")
    (write(tmp_path / "run", 0, [(1, 1.0)]) / "metrics.csv").unlink()
    with pytest.raises(UsageError, match="run: has no curves"):
        recipes.compare(tmp_path)


def test_curves_meet_where_all_of_them_are_known() -> None:
    steps, values = comparison.on_one_axis([[(0, 0.0), (10, 10.0)], [(5, 1.0), (20, 4.0)]])
    assert steps.tolist() == [5, 10]
    np.testing.assert_allclose(values, [[5.0, 10.0], [1.0, 2.0]])


def test_the_command_prints_the_table_and_writes_its_files(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, table = tmp_path / "made" / "curves.png", tmp_path / "table.csv"
    main(["compare", str(logs), "--plot", str(picture), "--csv", str(table)])
    said = capsys.readouterr().out
    assert "clip_range" in said and "35 [" not in said.splitlines()[1]
    assert "25 [" in said.splitlines()[2], "the mean with its interval"
    assert pd.read_csv(table)["final"].tolist() == [25.0, 32.5]
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="docx"):
        main(["compare", str(logs), "--plot", str(tmp_path / "curves.docx")])


def test_curves_of_tensorboard_are_read_with_their_time(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    run = write(tmp_path / "GRPO-addition" / "version_0", 3, [])
    (run / "metrics.csv").unlink()
    with SummaryWriter(str(run)) as writer:
        for step in range(3):
            writer.add_scalar("train/reward", step / 4, step, walltime=100.0 + 2 * step)
    result = compared_runs.read(run)
    assert (result.name, result.seed, result.seconds) == ("GRPO-addition", 3, 4.0)
    assert result.curves == {"train/reward": [(0, 0.0), (1, 0.25), (2, 0.5)]}


# ---------------------------------------------------------------- stopped, empty and mixed folders


def _task(name: str, seed: int, points: list, metric: str = "eval/mean_reward", end: str = "", **settings):
    """Makes a run ``logs/<name>``, with the note of its end."""

    def make(folder: Path) -> None:
        trainer = settings.pop("trainer", None)
        run = write(folder / name, seed, points, metric, **settings)
        if end:
            (run / "ended_at").write_text(end)
        if trainer:
            (run / "config.yaml").write_text(yaml.safe_dump({"trainer": trainer}))

    return make


FULL = {"total_timesteps": 100}
MAZE, CHAIN, ADDITION = "PPO-Maze-v0", "PPO-Chain-v0", "GRPO-addition"
WHOLE = _task(f"{MAZE}/whole", 0, [(0, 9.0), (50, 1.0), (100, 2.0)], **FULL)
#: Folders; the runs that are compared, unfinished, and left out; the finals.
FOLDERS: dict[str, tuple[list, int, int, int, list[float]]] = {
    "whole": ([WHOLE], 1, 0, 0, [2.0]),
    "stopped": ([WHOLE, _task(f"{MAZE}/b", 1, [(0, 9.0), (60, 4.0)], **FULL)], 2, 1, 0, [3.0]),
    "stopped before an evaluation": ([WHOLE, _task(f"{MAZE}/b", 1, [(0, 9.0)], **FULL)], 1, 0, 1, [2.0]),
    "ended early": ([_task(f"{MAZE}/a", 0, [(40, 5.0)], end="40\n", **FULL)], 1, 0, 0, [5.0]),
    "resumed after its end, and stopped": (
        [_task(f"{MAZE}/a", 0, [(100, 5.0), (130, 6.0)], end="100\n", total_timesteps=200)],
        1,
        1,
        0,
        [6.0],
    ),
    "a note of noise": ([_task(f"{MAZE}/a", 0, [(40, 5.0)], end="yes", **FULL)], 1, 1, 0, [5.0]),
    "stopped after a whole one with its seed": ([WHOLE, _task(f"{MAZE}/xb", 0, [(10, 7.0)], **FULL)], 1, 0, 0, [2.0]),
    "whole after a stopped one": ([_task(f"{MAZE}/a", 0, [(10, 7.0)], **FULL), WHOLE], 1, 0, 0, [2.0]),
    "no limit and no note": ([_task(f"{ADDITION}/a", 0, [(0, 0.1), (8, 0.5)], "eval/pass@1")], 1, 1, 0, [0.5]),
    "optimizer steps": (
        [_task(f"{ADDITION}/a", 0, [(0, 0.9), (8, 0.5)], "eval/pass@1", trainer={"max_steps": 8})],
        1,
        0,
        0,
        [0.5],
    ),
    "passes over the data": ([_task(f"{ADDITION}/a", 0, [(8, 0.5)], "eval/pass@1", end="9")], 1, 0, 0, [0.5]),
    "no curves": ([WHOLE, _task(f"{MAZE}/b", 1, [])], 1, 0, 1, [2.0]),
    "two tasks": ([WHOLE, _task(f"{CHAIN}/a", 0, [(100, 7.0)], **FULL)], 2, 0, 0, [7.0, 2.0]),
    "control and language": (
        [WHOLE, _task(f"{ADDITION}/a", 0, [(0, 0.9), (8, 0.5)], "eval/pass@1", end="8")],
        2,
        0,
        0,
        [0.5, 2.0],
    ),
    "a task without a metric": ([WHOLE, _task(f"{CHAIN}/a", 0, [(5, 1.0)], "time/fps")], 1, 0, 1, [2.0]),
    "a task by its settings": (
        [_task("mine/a", 0, [(100, 7.0)], env_id="Maze-v0", **FULL), WHOLE],
        2,
        0,
        0,
        [2.0, 7.0],
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_stopped_empty_and_mixed_folders_are_compared_or_marked(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, compared, unfinished, left_out, finals = FOLDERS[kind]
    for one in make:
        one(tmp_path / "logs")
    main(["compare", str(tmp_path / "logs"), "--csv", str(tmp_path / "t.csv"), "--plot", str(tmp_path / "p.png")])
    out, err = capsys.readouterr()
    table = pd.read_csv(tmp_path / "t.csv")
    assert (table["n"].sum(), table["unfinished"].sum()) == (compared, unfinished)
    assert table["final"].tolist() == finals and err.count("left out") == left_out
    assert out.count("\nunfinished: ") == unfinished and ("1 of " in out) == bool(unfinished)
    assert out.count("is better") == table["task"].nunique()


def test_settings_that_change_what_is_learned_come_first(tmp_path: Path) -> None:
    aside = {"eval_freq": 1, "log_every": 1}
    for i, clip_range in enumerate((0.1, 0.2)):
        own = {"clip_range": clip_range, "gae_lambda": 0.95, "vf_coef": 0.5, "eval_freq": i, "log_every": i}
        write(tmp_path / "PPO-Maze-v0" / f"v{i}", i, [(1, 1.0)], **own)
    # A2C's gae_lambda is its default. Its vf_coef was changed.
    write(tmp_path / "A2C-Maze-v0" / "v0", 0, [(1, 1.0)], gae_lambda=1.0, vf_coef=0.25, **aside)
    columns = list(recipes.compare(tmp_path))
    own = columns[columns.index("run") + 1 : columns.index("seeds")]
    assert own == ["clip_range", "vf_coef", "gae_lambda", "eval_freq", "log_every"]


def test_a_run_of_the_trainer_notes_its_end_and_a_stopped_one_does_not(tmp_path: Path) -> None:
    def run(total: int, **arguments) -> None:
        data = RolloutDataModule("Maze-v0", n_envs=2, n_steps=8, total_timesteps=total, eval_freq=0, n_test_episodes=1)
        recipes.Trainer(default_root_dir=tmp_path, enable_progress_bar=False, **arguments).fit(PPO(), data)

    run(64, callbacks=[StopAfter(2)])
    with pytest.raises(RuntimeError, match="power cut"):
        run(64, callbacks=[StopAfter(2, RuntimeError("power cut"))])
    ended, stopped = (compared_runs.read(path) for path in compared_runs.runs_in(tmp_path))
    assert (ended.ended, stopped.ended) == (True, False)
    assert ended.last_step < 64 == ended.wanted and ended.task == "Maze-v0"


# ---------------------------------------------------------------- folders that somebody sent

GOOD = "step,epoch,eval/mean_reward\n1,0,1.0\n2,0,2.0\n"


def _table(text: str | bytes) -> Callable[[Path], object]:
    return lambda run: (run / "metrics.csv").write_bytes(text if isinstance(text, bytes) else text.encode())


def _hparams(text: str | bytes) -> Callable[[Path], object]:
    return lambda run: (run / "hparams.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())


def _config(text: str | bytes) -> Callable[[Path], object]:
    return lambda run: (run / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())


def _instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        make(run / name)

    return change


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _events(data: bytes) -> Callable[[Path], object]:
    return lambda run: (run / "events.out.tfevents.1").write_bytes(data)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij")
)
#: What is wrong with a folder, and whether its run is read all the same.
DAMAGE: dict[str, tuple[Callable[[Path], object], bool]] = {
    "broken yaml": (_hparams("seed: [1"), False),
    "a tag": (_hparams("seed: !!python/object/apply:os.system [touch ran]"), False),
    "an alias bomb": (_hparams(BOMB), False),
    "an alias bomb in the config": (_config(BOMB), False),
    "a list that contains itself": (_hparams("seed: 0\nx: &x [*x]"), False),
    "deep nesting": (_hparams("x: " + "[" * 100_000), False),
    "hparams of a list": (_hparams("[1, 2]"), False),
    "hparams of a text": (_hparams("nothing"), False),
    "hparams in latin-1": (_hparams("x: caf\xe9".encode("latin-1")), False),
    "hparams of zeros": (_hparams(b"\0" * 100), False),
    "huge hparams": (_instead("hparams.yaml", _sparse), False),
    "hparams as a folder": (_instead("hparams.yaml", Path.mkdir), False),
    "hparams as a pipe": (_instead("hparams.yaml", os.mkfifo), False),
    "hparams as a link to nothing": (_instead("hparams.yaml", lambda path: path.symlink_to("absent")), False),
    "hparams as a link to itself": (_instead("hparams.yaml", lambda path: path.symlink_to(path)), False),
    "hparams as a device": (_instead("hparams.yaml", lambda path: path.symlink_to("/dev/zero")), False),
    "a number of many digits": (_hparams("x: 0x" + "f" * 100_000), False),
    "a seed of text": (_hparams("seed: first"), False),
    "names of the table's columns": (_hparams("seed: 5\nrun: x\nseeds: 3\nfinal: a\nn: 1"), True),
    "escapes in a setting": (_hparams('seed: 6\nx: "\\e[31mred\\a\\n"\n"\\e]0;t\\a": 1'), True),
    "keys that are no texts": (_hparams("seed: 7\n1: a\n2.5: b\nnull: c"), True),
    "nested settings": (_hparams("seed: 8\nx: {a: [1, {b: 2}]}\ny: .nan"), True),
    "config as a pipe": (_instead("config.yaml", os.mkfifo), False),
    "config without classes": (_config("model: 3\ndata: [4]"), False),
    "config with a trainer of text": (_config("trainer: none"), False),
    "metrics as a pipe": (_instead("metrics.csv", os.mkfifo), False),
    "metrics as a folder": (_instead("metrics.csv", Path.mkdir), False),
    "huge metrics": (_instead("metrics.csv", _sparse), False),
    "no metrics": (_instead("metrics.csv", lambda path: None), False),
    "empty metrics": (_table(""), False),
    "metrics without rows": (_table("step,eval/mean_reward\n"), False),
    "metrics without steps": (_table("epoch,eval/mean_reward\n0,1\n"), False),
    "metrics of another kind": (_table("step,other\n0,1\n"), False),
    "metrics in latin-1": (_table("step,caf\xe9\n1,2\n".encode("latin-1")), False),
    "ragged metrics": (_table(GOOD + "1,2,3,4,5,6\n"), False),
    "an open quote": (_table(GOOD + '"1,2\n3,4\n'), False),
    "words for numbers": (_table(GOOD + "3,0,\x1b[31mhigh\n"), False),
    "steps of NaN": (_table(GOOD + "nan,0,1\n"), False),
    "infinite steps": (_table(GOOD + "1e400,0,1\n"), False),
    "infinite values": (_table(GOOD + "3,0,inf\n4,0,1e308\n"), True),
    "values of NaN": (_table(GOOD + "3,0,nan\n"), True),
    "very many columns": (_table("step," + ",".join(f"c{i}" for i in range(50_000)) + "\n"), False),
    "escapes in a metric's name": (_table("step,eval/mean_reward,\x1b[2J\n1,1,1\n"), True),
    "events as a pipe": (_instead("events.out.tfevents.1", os.mkfifo), False),
    "events as a folder": (_instead("events.out.tfevents.1", Path.mkdir), False),
    "huge events": (_instead("events.out.tfevents.1", _sparse), False),
    "events of noise": (_events(bytes(range(256)) * 40), False),
    "events with a length without end": (_events(b"\xff" * 8 + b"\0" * 40), False),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_folder_is_one_line_and_the_others_are_compared(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(2):
        write(tmp_path / "logs" / "PPO-x" / f"version_{seed}", seed, [(1, 1.0), (2, 2.0)])
    bad = write(tmp_path / "logs" / "PPO-x" / "version_2", 4, [(1, 5.0)])
    change, is_read = DAMAGE[damage]
    change(bad)
    main(["compare", "logs", "--csv", "table.csv", *(["--plot", "plot.png"] if is_read else [])])
    out, err = capsys.readouterr()
    assert not set(map(ord, out + err)) & {*range(32), 127, *range(128, 160)} - {10}
    assert "eval/mean_reward, higher is better" in out and not (tmp_path / "ran").exists()
    lines = [line for line in err.splitlines() if "left out" in line]
    if is_read:
        assert not lines and sum(pd.read_csv("table.csv")["n"]) == 3
    else:
        assert len(lines) == 1 and ("version_2" in lines[0] or "seed 4" in lines[0]), err
        assert sum(pd.read_csv("table.csv")["n"]) == 2
    if damage != "metrics of another kind" and not is_read:
        with pytest.raises((UsageError, SystemExit)):
            main(["compare", str(bad)])


def test_folders_below_a_thousand_others_are_found(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(400):
        deep /= "d"
    deep.mkdir(parents=True)
    (deep / "hparams.yaml").write_text("seed: 1")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert compared_runs.runs_in(tmp_path) == [deep]
