"""The `regard` command line, without torch: signatures and help. The work is done in `regard.cli`.

`import regard` imports torch, which takes seconds. This package is therefore not part of `regard`: help, `regard tasks`
and usage errors answer at once, and a command imports its implementation only when it runs.
"""

try:
    from regard_cli.commands import app
    from regard_cli.entry_point import main
except ModuleNotFoundError as error:
    if error.name not in ("typer", "rich"):
        raise
    raise SystemExit(f"regard: the command needs {error.name}: pip install 'regard[command]'") from error

__all__ = ["app", "main"]
