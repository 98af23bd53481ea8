"""`prism-ray cluster`: the files of cluster/ with an account's values in them, and whether they hold what they must."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from prism_ray.core.errors import EXIT_FAILED, ConfigError

app = typer.Typer(name="cluster", no_args_is_help=True, help=__doc__)

Source = Annotated[Path, typer.Option(help="folder of launcher/, kuberay/ and images/; its parent is the repository")]


@app.command("render")
def render(
    out: Annotated[Path, typer.Argument(help="folder to write")],
    values: Annotated[Path, typer.Option(help="your values: an edited copy of cluster/values.example.yaml")],
    source: Source = Path("cluster"),
    replace: Annotated[bool, typer.Option(help="write anew a folder that an earlier render wrote")] = False,
) -> None:
    """Write every manifest whose section VALUES has into OUT; all or nothing. Exit code 2, in one line, for a value that is missing, wrong or still the placeholder."""
    from prism_ray.dist.manifests.render import refuse_examples, render_all, write_manifests
    from prism_ray.dist.manifests.values import load_values

    chosen, root = load_values(values), source.resolve().parent
    manifests, left_out = render_all(source, chosen, root)
    refuse_examples(manifests, chosen, root, str(values))
    for path in write_manifests(manifests, out, replace=replace):
        typer.echo(path)
    for name in left_out:
        typer.echo(f"left out, no section for it: {name}")


@app.command("check")
def check(
    values: Annotated[Path | None, typer.Option(help="values to check with; default the placeholders of SOURCE")] = None,
    prices: Annotated[Path | None, typer.Option(help="price table; default SOURCE/prices.yaml")] = None,
    source: Source = Path("cluster"),
    limit_mib: Annotated[float, typer.Option(help="largest job package, MiB", min=0)] = 100.0,
) -> None:
    """Check the manifests, images and runtime environments of SOURCE and print what each cluster costs an hour, at least and at most. Exit code 1 with findings."""
    from prism_ray.dist.manifests.check import check as check_all
    from prism_ray.dist.manifests.costs import cost_lines, load_prices
    from prism_ray.dist.manifests.values import load_values

    root, table = source.resolve().parent, load_prices(prices or source / "prices.yaml")
    done = check_all(
        source, load_values(values or source / "values.example.yaml"), table, root, parse_arguments, limit_bytes=int(limit_mib * 2**20)
    )
    for manifest in done.manifests:
        wrong = sum(finding.where.startswith(manifest.name) for finding in done.findings)
        typer.echo(f"{f'{wrong} finding(s)' if wrong else 'ok':<14}{manifest.name}")
    for name in done.left_out:
        typer.echo(f"{'left out':<14}{name}: no section for it in the values")
    if done.package:
        typer.echo(f"\njob package: {done.package}")
    if done.costs:
        typer.echo("\n" + "\n".join(cost_lines(done.costs, table, datetime.date.today())))
    if done.findings:
        typer.echo("\n" + "\n".join(f"- {finding.line()}" for finding in done.findings))
        raise typer.Exit(EXIT_FAILED)


def parse_arguments(words: list[str]) -> None:
    """Take a command line as far as it goes without starting anything; ConfigError for what it would refuse."""
    from prism_ray.cli import main
    from prism_ray.cli.spaces import load_space
    from prism_ray.dist.config import SweepConfig

    verbs = typer.main.get_group(main.app).commands
    if not words or words[0] not in verbs:
        raise ConfigError(f"there is no 'prism-ray {' '.join(words[:1])}'", where="entrypoint", remedy=f"known: {', '.join(sorted(verbs))}")
    try:
        context = verbs[words[0]].make_context(words[0], list(words[1:]))
    except Exception as error:
        # click's usage errors, under whichever name typer has them; anything else is ours.
        if not hasattr(error, "format_message"):
            raise
        raise ConfigError(error.format_message(), where=f"prism-ray {words[0]}", remedy="see its --help") from None
    if words[0] == "sweep":
        load_space(context.params["space"], SweepConfig, context.params["overrides"] or [])
