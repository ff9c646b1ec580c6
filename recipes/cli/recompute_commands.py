"""The words after ``rl replay`` and ``rl verify``, and what both print."""

from pathlib import Path

from recipes.cli.options import Parser


def replay_command(args: list[str]) -> None:
    """``rl replay RUN --step N``."""
    parser = Parser("rl replay", description="Rebuild the batch, the loss and the gradient's norm of one update, from "
                     "the nearest checkpoint before it.")  # fmt: skip
    parser.add_argument("run", type=Path, help="folder of the run, for example logs/PPO-CartPole-v1/version_0")
    parser.add_argument("--step", type=int, required=True, help="number of the update, from 1")
    parser.add_argument("--output", type=Path, default=None, help="file to write; default: update-<step>.pt")
    parser.add_argument(
        "--interactive", action="store_true", help="open a Python console with the update and the model"
    )
    options = parser.parse_args(args)
    from recipes.cli.replay import replay

    output = options.output or Path(f"update-{options.step}.pt")
    update = replay(options.run, options.step, output, options.interactive)
    loss, norm = update["loss"], update["grad_norm"]
    print(f"loss           {'none: not gradient descent on a loss' if loss is None else f'{loss.item():.9g}'}")
    print(f"gradient norm  {'none: no gradient' if norm is None else f'{norm.item():.9g}, before clipping'}")
    print(f"written to     {output}: torch.load({str(output)!r}, weights_only=True)")


def verify_command(args: list[str]) -> None:
    """``rl verify RUN``."""
    parser = Parser("rl verify", description="Recompute a run from one checkpoint to its last and compare bit for bit.")
    parser.add_argument("run", type=Path, help="folder of the run, for example logs/PPO-CartPole-v1/version_0")
    parser.add_argument("--from", dest="start", default=None,
                        help="checkpoint to start from, for example step-100; start: the run's beginning")  # fmt: skip
    options = parser.parse_args(args)
    from recipes.cli.verify import verify

    verdict = verify(options.run, options.start)
    print(verdict)
    if not verdict.is_same:
        raise SystemExit(1)
