"""Runs side by side: the table, its statistics, and the plot."""

import csv
from pathlib import Path

import numpy as np
import pytest
import yaml

import recipes
from recipes import comparison
from recipes.cli import main
from rl_modules.common.errors import UsageError

pd = pytest.importorskip("pandas")
pytest.importorskip("rliable")

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
    with pytest.raises(UsageError, match="run has no curves"):
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
    result = comparison.read(run)
    assert (result.name, result.seed, result.seconds) == ("GRPO-addition", 3, 4.0)
    assert result.curves == {"train/reward": [(0, 0.0), (1, 0.25), (2, 0.5)]}
