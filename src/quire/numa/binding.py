"""Keeps the threads and the memory of this process to its part of the machine.

    choose_binding  chooses the part that the option and the machine give to a rank
    bind_threads    before those that compute are started: they inherit it
    memory_of_part  around the loading of weights: what is first written meanwhile lies in the part
    place           memory that is written later: the KV cache

Weights are given a policy of their own, too, once they are there. It changes nothing of where they
are, but Linux's automatic balancing, which marks pages to see who reads them and moves them, leaves
alone what has one.

Where the system forbids the calls on memory, as in a container without the capability SYS_NICE,
threads are bound all the same, and a line in the log says so: a page then lies on the node of the
thread that first writes it, which is one of the part's. Called by `assembly.rank_build`.
"""

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from quire.errors import ConfigurationError
from quire.numa.numa_options import OFF, NumaOptions
from quire.numa.planning import Part, plan
from quire.numa.regions import Region, added_memory, anonymous_memory
from quire.numa.system_calls import LinuxCalls, MemoryPolicy, NumaCalls
from quire.numa.topology import Topology, format_list, read_topology
from quire.observability.log import get_logger

STRICT_SHARE = 0.95
"""Of a part's memory that is free: with more, pages may come from other nodes, where the strict
policy would have the system kill the process."""

REFUSALS = (errno.EPERM, errno.ENOSYS, errno.EACCES)

logger = get_logger(__name__)


def choose_part(options: NumaOptions, rank: int, num_ranks: int, topology: Topology) -> Part | None:
    """What this rank shall keep to; None: to nothing, as on "auto" with one memory node.

    Raises ConfigurationError for nodes or CPUs that are not there.
    """
    parts = _parts(options, num_ranks, topology)
    return None if parts is None else parts[rank]


def _parts(options: NumaOptions, num_parts: int, topology: Topology) -> tuple[Part, ...] | None:
    """Of ranks or replicas, as the option divides the machine; None: it doesn't."""
    if options.numa == OFF:
        return None
    named = options.numa_nodes
    if named is None:
        return plan(topology, num_parts) if topology.has_several else None
    nodes, cpus = named
    _check_named(options.numa, nodes, cpus, topology)
    return plan(topology.only(cpus, nodes), num_parts, uses_bare_memory=True)


def find_topology(options: NumaOptions) -> Topology | None:
    """This machine's; None: on "off", and on "auto" where the system doesn't show it, which a line
    in the log says.

    Raises ConfigurationError where nodes are named, and the system doesn't show them.
    """
    if options.numa == OFF:
        return None
    try:
        return read_topology()
    except (OSError, ValueError) as error:
        if options.numa_nodes is not None:
            raise ConfigurationError(
                f"numa is {options.numa!r}, but the nodes of this machine can't be read ({error});"
                " say 'auto' or 'off'"
            ) from error
        logger.warning("numa: nothing is bound: the machine's nodes can't be read (%s)", error)
        return None


def split_for_replicas(options: NumaOptions, num_replicas: int) -> tuple[Part, ...] | None:
    """Of each replica on this machine; None: nothing is bound.

    Raises ConfigurationError for nodes or CPUs that are not there.
    """
    topology = find_topology(options)
    return None if topology is None else _parts(options, num_replicas, topology)


def has_own_policy(calls: NumaCalls | None = None) -> bool:
    """Whether this process was started with a policy for its memory, as by numactl."""
    try:
        return (calls or LinuxCalls()).thread_policy() != MemoryPolicy.DEFAULT
    except OSError:  # where it can't be asked it can't be changed either
        return False


def _check_named(
    value: str, nodes: Collection[int], cpus: Collection[int] | None, topology: Topology
) -> None:
    there = {node.id for node in topology.nodes}
    if missing := set(nodes) - there:
        has = f"nodes {format_list(there)}" if there else "no nodes, as Linux shows it"
        raise ConfigurationError(
            f"numa is {value!r}, but node {format_list(missing)} is not there: this machine has"
            f" {has}; name others, or say 'auto' or 'off'"
        )
    if not set(nodes) & set(topology.memory_nodes):
        raise ConfigurationError(
            f"numa is {value!r}, but these nodes have no memory that this process may use; it may"
            f" use that of nodes {format_list(topology.memory_nodes)}"
        )
    usable = topology.only(None, nodes).cpus
    if not usable or (cpus is not None and not set(cpus) <= set(usable)):
        raise ConfigurationError(
            f"numa is {value!r}, but of these nodes this process may run on"
            f" {f'CPUs {format_list(usable)} only' if usable else 'no CPU'}; name nodes and CPUs"
            " that are there"
        )


def choose_binding(
    options: NumaOptions,
    rank: int,
    num_ranks: int,
    *,
    num_threads: int | None,
    most_threads: int | None,
    num_engines: int = 1,
) -> "Binding | None":
    """What a rank shall keep to; nothing is bound yet. None: nothing is to be.

    num_threads: that compute in this rank; None: one a physical core of the part, but no more than
    most_threads (None: any number). num_engines: that have these nodes, this one included. Raises
    ConfigurationError.
    """
    topology = find_topology(options)
    part = None if topology is None else choose_part(options, rank, num_ranks, topology)
    if topology is None or part is None:
        return None
    num_threads = num_threads or min(len(part.cpus), most_threads or len(part.cpus))
    part = replace(part, num_sharing=part.num_sharing * num_engines)
    respects_policy = options.numa_nodes is None
    return Binding(part, topology, num_threads, respects_policy=respects_policy)


class Binding:
    """One rank's part, and what the system allows of keeping to it.

    Invariant: after the first call that was refused no other on memory is made, and one line was
    logged.
    """

    def __init__(
        self,
        part: Part,
        topology: Topology,
        num_threads: int,
        *,
        calls: NumaCalls | None = None,
        respects_policy: bool = True,
        regions: Callable[[], list[Region]] | None = None,
    ) -> None:
        """num_threads: that compute. respects_policy: whether a policy with which the process was
        started (by numactl) stays as it is. regions: reads where memory is that
        weights may be in; None: of this process."""
        self.part = part
        self.num_threads = num_threads
        self.leaves_nodes = not set(topology.memory_nodes) <= set(part.memory_nodes)
        self._free_bytes = {
            node.id: node.free_bytes for node in topology.nodes if node.id in part.memory_nodes
        }
        self._respects_policy = respects_policy
        self._binds_memory = bool(part.memory_nodes)
        self._is_strict = True
        self._is_bound = False
        self._regions = regions or partial(anonymous_memory, with_heap=False)
        self.calls: NumaCalls = calls or LinuxCalls()

    @property
    def binds_memory(self) -> bool:
        """Whether memory is bound, as far as is known."""
        return self._binds_memory

    @property
    def free_bytes(self) -> int | None:
        """Of the part's nodes when they were read, together: this part's share. None: it has no
        nodes, since the system shows no CPUs of any."""
        if not self.part.memory_nodes:
            return None
        return sum(self._free_bytes.values()) // self.part.num_sharing

    @property
    def where(self) -> str:
        """ "node 0" or "nodes 0-3"."""
        return name_nodes(self.part.memory_nodes)

    def bind_threads(self) -> None:
        """The calling thread, and those that it starts from now on."""
        cpus = self.part.cpus_for(self.num_threads)
        self._is_bound = False
        try:
            _set_affinity(cpus)
            self._is_bound = True
        except OSError as error:
            logger.warning(
                "numa: threads can't be kept to CPUs %s (%s): they run where the system puts them",
                format_list(cpus),
                error.strerror,
            )

    def expect(self, num_bytes: int) -> None:
        """Of weights and KV cache in this part; with more than is free there, some of it will lie
        elsewhere."""
        if (free_bytes := self.free_bytes) is None:
            return
        self._is_strict = num_bytes <= STRICT_SHARE * free_bytes
        if not self._is_strict and self._binds_memory:
            logger.warning(
                "numa: %d bytes of weights and KV cache are more than is free on %s (%d bytes): the"
                " rest lies on other nodes",
                num_bytes,
                self.where,
                free_bytes,
            )

    @contextmanager
    def memory_of_part(self) -> Iterator[None]:
        """New pages of this thread, and of those that it starts meanwhile, come from the part; so
        do, later, those of memory that is added meanwhile."""
        if not self._may_bind():
            yield
            return
        before = self._regions()
        self._try(lambda: self.calls.set_thread_policy(self._policy, self._targets))
        try:
            yield
        finally:
            self._try(lambda: self.calls.set_thread_policy(MemoryPolicy.DEFAULT, ()))
        for begin, end in added_memory(before, self._regions()):
            self.place(begin, end - begin)

    def place(self, address: int, num_bytes: int) -> None:
        """The pages of this memory that are not there yet come from the part, whoever writes them.
        Memory that another thread has given back meanwhile is left out."""
        self._try(
            lambda: self.calls.set_range_policy(address, num_bytes, self._policy, self._targets)
        )

    def tell(self) -> None:
        """A line in the log: where this process keeps to."""
        cpus = format_list(self.part.cpus_for(self.num_threads))
        logger.info(
            "numa: %d threads on %s, %s %s",
            self.num_threads,
            f"CPUs {cpus}" if self._is_bound else "any CPUs",
            "memory on" if self._binds_memory else "of",
            self.where,
        )

    @property
    def _policy(self) -> MemoryPolicy:
        if len(self.part.memory_nodes) > 1:
            return MemoryPolicy.INTERLEAVE  # which uses others, too, where these are full
        return MemoryPolicy.BIND if self._is_strict else MemoryPolicy.PREFERRED

    @property
    def _targets(self) -> tuple[int, ...]:
        return self.part.memory_nodes

    def _may_bind(self) -> bool:
        """Whether memory is this object's to bind."""
        policy = int(MemoryPolicy.DEFAULT)

        def ask() -> None:
            nonlocal policy
            policy = self.calls.thread_policy()

        self._try(ask)
        if self._binds_memory and self._respects_policy and policy != MemoryPolicy.DEFAULT:
            logger.info("numa: memory keeps to the policy that this process was started with")
            self._binds_memory = False
        return self._binds_memory

    def _try(self, call: Callable[[], None]) -> None:
        if not self._binds_memory:
            return
        try:
            call()
        except OSError as error:
            if error.errno == errno.EFAULT:
                return
            self._binds_memory = False
            hint = ""
            if error.errno in REFUSALS:
                hint = "; in a container it takes the capability SYS_NICE"
            logger.warning(
                "numa: memory can't be bound to %s, since %s is refused (%s%s): threads keep to the"
                " part's CPUs, and a page lies where it is first written",
                self.where,
                error.filename or "a system call",
                error.strerror,
                hint,
            )


def name_nodes(nodes: Collection[int]) -> str:
    """ "node 0" or "nodes 0-3"."""
    if not nodes:
        return "any node"
    return f"node{'s' if len(nodes) > 1 else ''} {format_list(nodes)}"


class _BoundThread(threading.local):
    """Where the calling thread could run before it was bound, and to what it was bound last."""

    before: tuple[set[int], set[int]] | None = None


_thread = _BoundThread()


def _set_affinity(cpus: Collection[int]) -> None:
    allowed = unbound_cpus()
    os.sched_setaffinity(0, cpus)
    _thread.before = allowed, set(cpus)


def unbound_cpus() -> set[int]:
    """What the calling thread may run on, apart from what an earlier engine of this process bound
    it to."""
    now, before = os.sched_getaffinity(0), _thread.before
    return before[0] if before is not None and before[1] == now else now


def unbind_threads() -> None:
    """Lets the calling thread run where it could before an earlier engine of this process."""
    allowed = unbound_cpus()
    if allowed != os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)
