"""`prism-ray`: one command, one thin file a verb. Errors of the user's making print one line and exit with 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from prism_ray import __version__
from prism_ray.cli import adapter, cluster, drift, local, package, plan, quantize, survey, sweep, train
from prism_ray.core.errors import EXIT_FAILED, EXIT_OK, EXIT_USER_ERROR, CalibrationFailed, PrismError, SweepFailed

app = typer.Typer(name="prism-ray", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.command("quantize")(quantize.quantize)
app.command("train")(train.train)
app.command("merge")(adapter.merge)
app.command("sweep")(sweep.sweep)
app.command("drift")(drift.drift)
app.command("plan")(plan.plan)
app.command("survey")(survey.survey)
app.command("package")(package.package)
app.command("local")(local.local)
app.add_typer(cluster.app, name="cluster")
app.add_typer(adapter.app, name="adapter")


@app.command("version")
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a sweep or calibration that failed its limits, 2 for bad input."""
    try:
        # Typer's own runner would print a traceback for a PrismError; standalone mode off hands exceptions and codes back.
        code = app(list(sys.argv[1:] if arguments is None else arguments), standalone_mode=False)
        return code if isinstance(code, int) else EXIT_OK
    except SweepFailed as error:
        print(f"sweep failed: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except CalibrationFailed as error:
        print(f"calibration failed: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except PrismError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        return EXIT_FAILED
    except Exception as error:
        # click's usage errors have a one-line message of their own; anything else is ours and keeps its traceback.
        if hasattr(error, "format_message"):
            print(f"error: {error.format_message()}", file=sys.stderr, flush=True)
            return EXIT_USER_ERROR
        raise


def main() -> None:
    """Console entry point."""
    sys.exit(run())


if __name__ == "__main__":
    main()
