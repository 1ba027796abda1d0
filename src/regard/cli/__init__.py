"""The `regard` command."""

try:
    from regard.cli.commands import app, main
except ModuleNotFoundError as error:
    if error.name not in ("typer", "rich"):
        raise
    raise SystemExit(f"regard: the command needs {error.name}: pip install 'regard[command]'") from error

__all__ = ["app", "main"]
