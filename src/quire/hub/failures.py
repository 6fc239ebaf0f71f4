"""Turns what the hub's client raises into sentences that say what to do.

Called by `fetching`.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import errors

from quire.errors import CheckpointError, QuireError
from quire.hub.model_files import shown_text

_KINDS = [kind for kind in errors.HfHubHTTPError.__mro__ if issubclass(kind, Exception)]
CLIENT_ERRORS: tuple[type[Exception], ...] = tuple(kind for kind in _KINDS if kind is not Exception)
"""The client's own, those of the HTTP library that this version of it happens to use, and what
Python raises below them."""

_NAMED: tuple[type[Exception], ...] = (*CLIENT_ERRORS, ValueError)


@contextmanager
def named_failures(name: str, revision: str | None) -> Iterator[None]:
    """What the hub's client raises becomes a sentence."""
    try:
        yield
    except QuireError:
        raise  # a sentence already
    except _NAMED as error:
        wanted = f"{name!r}" if revision is None else f"{name!r}, revision {revision!r},"
        raise CheckpointError(
            f"{wanted} is not a folder here, and {_why_not(name, error)}"
        ) from error


def _why_not(name: str, error: Exception) -> str:
    """Why the hub did not give it, and what to do; of a repository what the hub says last."""
    token = "with HF_TOKEN=... in the environment, or after `hf auth login`"
    page = f"https://huggingface.co/{name}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the hub gives it only to those who accepted its terms: accept them at {page}, and"
            f" try again {token}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the hub has no such model, or shows it only to its owners; check the id ({page}"
            f"{_without_owner(name)}), or, if it is private, try again {token}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub's model has no such revision; see {page}/tree/main for those that it has"
    if isinstance(error, errors.HFValidationError):
        return (
            f"can't be a hub id ({shown_text(error)}); name a folder in Hugging Face's"
            " format, or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full ({shown_text(error)}); free some of it, or let HF_HOME name a"
            " folder on another one"
        )
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return (
            f"a file of its size can't be written ({shown_text(error)}), by the disk's format or by"
            " a limit (`ulimit -f`); let HF_HOME and TMPDIR name folders that take larger ones"
        )
    if isinstance(error, PermissionError):
        return (
            f"the hub's files can't be written ({shown_text(error)}); let HF_HOME name a folder "
            "that may be written"
        )
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        reason = "" if error.__cause__ is None else f": {shown_text(error.__cause__)}"
        return (
            f"the hub can't be reached from here (no network, or HF_HUB_OFFLINE is set{reason}), "
            "nor has it been fetched before; fetch it where there is a network with `hf download "
            f"{name} --local-dir FOLDER`, and name that folder{_without_owner(name)}"
        )
    return (
        f"can't be had from the hub as a model id: {shown_text(error)} -- name a folder in Hugging "
        "Face's format, or a hub id such as 'Qwen/Qwen3-0.6B' that this machine can reach"
    )


def _without_owner(name: str) -> str:
    """What to say besides of an id without an owner, as few old models have; "": it has one."""
    return "" if "/" in name else "; a hub id has an owner, as in 'Qwen/Qwen3-0.6B'"
