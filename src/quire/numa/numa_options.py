"""The option `numa`: on which memory nodes and CPUs of the machine an engine computes.

`binding` applies the option. It imports no torch, so that the command line can read the option.
"""

from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigurationError
from quire.numa.topology import parse_list
from quire.option_fields import Flag, Kind, Options, option

AUTO, OFF = "auto", "off"


@dataclass(frozen=True, slots=True)
class Nodes(Kind):
    """A value "auto", "off", nodes such as "0" or "0-1,4", or nodes and their CPUs: "0:0-7"."""

    metavar = "NODES"

    def validate(self, name: str, value: Any, *, is_optional: bool) -> str:
        if value is False:  # YAML reads a bare off as false
            return OFF
        if value in (AUTO, OFF):
            return str(value)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        try:
            if not isinstance(value, str) or not all(map(parse_list, value.split(":", 1))):
                raise ValueError
        except ValueError:
            raise ConfigurationError(
                f"{name} is {value!r:.80}, but must be 'auto', 'off', nodes such as '0' or '0-1',"
                " or nodes with some of their CPUs, such as '0:0-7'"
            ) from None
        return value


@dataclass(frozen=True)
class NumaOptions(Options):
    """The placement of threads and memory on a machine with several memory nodes."""

    numa: str = option(
        AUTO,
        Nodes(),
        group="computation",
        help="nodes whose cores and memory are used: auto, off, or nodes such as 0 or 0-1",
        doc='"auto": on a machine with several memory nodes each rank computes on the cores of its'
        " own nodes, one thread a physical core, and has its weights and KV cache there. With one"
        ' node nothing is bound. "off": nothing is bound. Nodes such as "0" or "0-1", or nodes and'
        ' CPUs of theirs ("0:0-7"): no others are used. On the CPU only.',
        flag=Flag(),
    )

    @property
    def numa_nodes(self) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
        """The named (nodes, CPUs); CPUs None: all CPUs of the nodes. None on "auto" and "off"."""
        if self.numa in (AUTO, OFF):
            return None
        nodes, colon, cpus = self.numa.partition(":")
        return parse_list(nodes), parse_list(cpus) if colon else None
