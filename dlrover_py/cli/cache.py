"""``dlrover cache …``: show and remove what runs have left on this machine for a faster start."""

import json
import os
from datetime import UTC, datetime

import click

from dlrover_py.cli import view
from dlrover_py.process.compile_cache import CompileCache
from dlrover_py.process.recipe_cache import RecipeCache
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import ENV_CACHE_DIR
from dlrover_py.protocol.words import counted


@click.group()
def cache() -> None:
    """Show and remove what earlier runs of scripts have left for a faster start.

    A recipe lists the modules that a script imports. With it, the first workers of the next run are
    forked from one process that has imported them. A folder of compiled code has what torch.compile
    has made of a script's models. It is kept only if DLROVER_CACHE_DIR names a folder.
    """


def _open() -> tuple[RecipeCache, CompileCache]:
    """Return the caches of this user.

    Raises:
        ConfigError: There is none.
    """
    recipes, compiled = RecipeCache.of(os.environ), CompileCache.of(os.environ)  # noqa: TID251 - as elastic-run finds them
    if recipes is None or compiled is None:
        raise ConfigError(
            f"there is no cache: {ENV_CACHE_DIR} is `none`, or this user has no home folder; "
            f"set {ENV_CACHE_DIR} to a folder"
        )
    return recipes, compiled


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def ls(as_json: bool) -> None:
    """List the recipes, the newest first, and then the compiled code.

    \f

    Args:
        as_json: print JSON instead of text.

    Raises:
        ConfigError: there is no cache, or another user can change it.
    """
    recipes, compiled = _open()
    try:
        entries, folders = recipes.entries(), [one for one in compiled.entries() if one.size]
    except OSError as error:
        raise ConfigError(f"{error.filename or recipes.folder}: {error.strerror}") from error
    if as_json:
        documents: list[dict[str, object]] = [
            {
                "kind": "recipe",
                "key": entry.key,
                "at": _at(entry.at).isoformat(timespec="seconds"),
                "size": entry.size,
                "script": entry.recipe.script if entry.recipe else "",
                "modules": [x[1] for x in entry.recipe.lines if x[0] == "import"]
                if entry.recipe
                else [],
            }
            for entry in entries
        ]
        documents += [
            {
                "kind": "compiled",
                "key": folder.key,
                "at": _at(folder.at).isoformat(timespec="seconds"),
                "size": folder.size,
                "script": folder.script,
            }
            for folder in folders
        ]
        click.echo(json.dumps(documents))
        return
    for entry in entries:
        what = "cannot be read"
        if entry.recipe is not None:
            modules = sum(kind == "import" for kind, _, _ in entry.recipe.lines)
            what = counted(modules, "module") if modules else "not used: forked workers died early"
            what = f"{what}  {entry.recipe.script}"
        _show(entry.key, entry.at, what)
    for folder in folders:
        _show(folder.key, folder.at, f"{folder.size / 1e6:.1f} MB compiled  {folder.script}")


def _at(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _show(key: str, at: float, what: str) -> None:
    """Print the line of an entry."""
    click.echo(view.plain(f"{key[:12]}  {_at(at):%Y-%m-%d %H:%M}  {what}"))


@cache.command()
@click.argument("keys", nargs=-1, metavar="[KEY…]")
@click.option("--all", "remove_all", is_flag=True, help="Remove all that no run uses.")
def rm(keys: tuple[str, ...], remove_all: bool) -> None:
    """Remove recipes and compiled code. KEY is the beginning of a key that `ls` shows.

    Compiled code that a run uses stays.

    \f

    Args:
        keys: beginnings of keys.
        remove_all: whether all are removed.

    Raises:
        ConfigError: neither or both are given, a key is unknown, or the cache cannot be changed.
            Also if a run uses one of the keys.
    """
    if bool(keys) == remove_all:
        raise ConfigError("expected KEY… or --all: which entries are to be removed")
    recipes, compiled = _open()
    try:
        known = [(entry.key, True) for entry in recipes.entries()]
        known += [(folder.key, False) for folder in compiled.entries()]
        for key in keys:
            if not (key and any(one.startswith(key) for one, _ in known)):
                raise ConfigError(f"there is no entry {key!r}; see `dlrover cache ls`")
        chosen = [(one, kind) for one, kind in known if remove_all or one.startswith(keys)]
        gone = [
            recipes.remove(key) if is_recipe else compiled.remove(key) for key, is_recipe in chosen
        ]
    except OSError as error:
        raise ConfigError(f"{error.filename or recipes.folder}: {error.strerror}") from error
    used = [
        key for (key, is_recipe), done in zip(chosen, gone, strict=True) if not (done or is_recipe)
    ]
    for is_recipe, noun in ((True, "recipe"), (False, "folder")):
        number = sum(
            kind == is_recipe and done for (_, kind), done in zip(chosen, gone, strict=True)
        )
        if is_recipe or number:
            what = counted(number, noun)
            click.echo(f"{what} removed" if is_recipe else f"{what} of compiled code removed")
    if used and not remove_all:
        raise ConfigError(
            f"compiled code {used[0][:12]} is used by a run, expected one that none uses; "
            "end the run first"
        )
