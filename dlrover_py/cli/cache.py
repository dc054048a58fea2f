"""``dlrover cache …``: show and remove the recipes of warm starts that are kept on this machine."""

import json
import os
from datetime import UTC, datetime

import click

from dlrover_py.cli import view
from dlrover_py.process.recipe_cache import ENV_CACHE_DIR, RecipeCache
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.words import counted


@click.group()
def cache() -> None:
    """Show and remove what earlier runs of scripts have left for a faster start.

    A recipe lists the modules that a script imports. With it, the first workers of the next run are
    forked from one process that has imported them.
    """


def _open() -> RecipeCache:
    """Return the cache of this user.

    Raises:
        ConfigError: There is none.
    """
    found = RecipeCache.of(os.environ)  # noqa: TID251 - as elastic-run finds it
    if found is None:
        raise ConfigError(
            f"there is no cache: {ENV_CACHE_DIR} is `none`, or this user has no home folder; "
            f"set {ENV_CACHE_DIR} to a folder"
        )
    return found


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def ls(as_json: bool) -> None:
    """List the recipes, the newest first.

    \f

    Args:
        as_json: print JSON instead of text.

    Raises:
        ConfigError: there is no cache, or another user can change it.
    """
    found = _open()
    try:
        entries = found.entries()
    except OSError as error:
        raise ConfigError(f"{found.folder}: {error.strerror}") from error
    for entry in entries if not as_json else ():
        at = datetime.fromtimestamp(entry.at, UTC)
        what = "cannot be read"
        if entry.recipe is not None:
            modules = sum(kind == "import" for kind, _, _ in entry.recipe.lines)
            what = counted(modules, "module") if modules else "not used: forked workers died early"
            what = f"{what}  {entry.recipe.script}"
        click.echo(view.plain(f"{entry.key[:12]}  {at:%Y-%m-%d %H:%M}  {what}"))
    if as_json:
        documents = [
            {
                "key": entry.key,
                "at": datetime.fromtimestamp(entry.at, UTC).isoformat(timespec="seconds"),
                "size": entry.size,
                "script": entry.recipe.script if entry.recipe else "",
                "modules": [x[1] for x in entry.recipe.lines if x[0] == "import"]
                if entry.recipe
                else [],
            }
            for entry in entries
        ]
        click.echo(json.dumps(documents))


@cache.command()
@click.argument("keys", nargs=-1, metavar="[KEY…]")
@click.option("--all", "remove_all", is_flag=True, help="Remove all recipes.")
def rm(keys: tuple[str, ...], remove_all: bool) -> None:
    """Remove recipes. KEY is the beginning of a key that `ls` shows.

    \f

    Args:
        keys: beginnings of keys.
        remove_all: whether all recipes are removed.

    Raises:
        ConfigError: neither or both are given, a key is unknown, or the cache cannot be changed.
    """
    if bool(keys) == remove_all:
        raise ConfigError("expected KEY… or --all: which recipes are to be removed")
    found = _open()
    try:
        known = [entry.key for entry in found.entries()]
        for key in keys:
            if not (key and any(one.startswith(key) for one in known)):
                raise ConfigError(f"there is no recipe {key!r}; see `dlrover cache ls`")
        chosen = [one for one in known if remove_all or one.startswith(keys)]
        for key in chosen:
            found.remove(key)
    except OSError as error:
        raise ConfigError(f"{found.folder}: {error.strerror}") from error
    click.echo(f"{counted(len(chosen), 'recipe')} removed")
