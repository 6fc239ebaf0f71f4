"""Binds one rank's threads and memory to CPU cores and memory nodes.

    choose_binding  chooses a rank's part (its cores and memory nodes) by the option `numa`
    bind_threads    is called before the computing threads start, which inherit the binding
    memory_of_part  is a context in which weights are loaded: their pages get the part's nodes
    place           binds memory that is written later: the KV cache

The memory of loaded weights also gets a memory policy. The policy moves no pages. But it makes
Linux's automatic NUMA balancing, which would move pages to their readers, skip this memory.

If the system forbids memory policies, as in a container without the capability SYS_NICE, threads
are still bound, and the log says so. Linux then puts a page on the node of the thread that first
writes it, which is a node of the part. Called by `rank_build`.
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
from quire.numa.system_calls import LinuxCalls, MemoryPolicy
from quire.numa.topology import Topology, format_list, read_topology
from quire.observability.log import get_logger

STRICT_SHARE = 0.95
"""The policy is strict if weights and KV cache need at most this share of the part's free memory.
Otherwise pages may come from other nodes: a strict policy could get the process killed."""

REFUSALS = (errno.EPERM, errno.ENOSYS, errno.EACCES)

logger = get_logger(__name__)


def choose_part(options: NumaOptions, rank: int, num_ranks: int, topology: Topology) -> Part | None:
    """The part of this rank; None if nothing is to be bound, as on "auto" with one memory node.

    Raises ConfigurationError for nodes or CPUs that the machine lacks.
    """
    parts = _parts(options, num_ranks, topology)
    return None if parts is None else parts[rank]


def _parts(options: NumaOptions, num_parts: int, topology: Topology) -> tuple[Part, ...] | None:
    """The parts of ranks or replicas; None if nothing is to be bound."""
    if options.numa == OFF:
        return None
    named = options.numa_nodes
    if named is None:
        return plan(topology, num_parts) if topology.has_several else None
    nodes, cpus = named
    _check_named(options.numa, nodes, cpus, topology)
    return plan(topology.only(cpus, nodes), num_parts, uses_bare_memory=True)


def find_topology(options: NumaOptions) -> Topology | None:
    """This machine's topology; None if `numa` is "off", or on "auto" if it can't be read (logged).

    Raises ConfigurationError if nodes are named and the topology can't be read.
    """
    if options.numa == OFF:
        return None
    try:
        return read_topology()
    except (OSError, ValueError) as error:
        if options.numa_nodes is not None:
            raise ConfigurationError(
                f"numa is {options.numa!r}, but the nodes of this machine can't be read ({error});"
                " set numa to 'auto' or 'off'"
            ) from error
        logger.warning("numa: nothing is bound: the machine's nodes can't be read (%s)", error)
        return None


def split_for_replicas(options: NumaOptions, num_replicas: int) -> tuple[Part, ...] | None:
    """The part of each replica on this machine; None if nothing is to be bound.

    Raises ConfigurationError for nodes or CPUs that the machine lacks.
    """
    topology = find_topology(options)
    return None if topology is None else _parts(options, num_replicas, topology)


def has_own_policy(calls: LinuxCalls | None = None) -> bool:
    """Whether this process was started with a memory policy, for example by numactl."""
    try:
        return (calls or LinuxCalls()).thread_policy() != MemoryPolicy.DEFAULT
    except OSError:  # a system that forbids reading the policy forbids changing it, too
        return False


def _check_named(
    value: str, nodes: Collection[int], cpus: Collection[int] | None, topology: Topology
) -> None:
    there = {node.id for node in topology.nodes}
    if missing := set(nodes) - there:
        has = f"nodes {format_list(there)}" if there else "no nodes, as Linux shows it"
        raise ConfigurationError(
            f"numa is {value!r}, but node {format_list(missing)} does not exist: this machine has"
            f" {has}; name others, or set numa to 'auto' or 'off'"
        )
    if not set(nodes) & set(topology.memory_nodes):
        raise ConfigurationError(
            f"numa is {value!r}, but these nodes have no memory that this process may use; it may"
            f" use that of nodes {format_list(topology.memory_nodes)}"
        )
    usable = topology.only(None, nodes).cpus
    if not usable or (cpus is not None and not set(cpus) <= set(usable)):
        raise ConfigurationError(
            f"numa is {value!r}, but on these nodes this process may run on"
            f" {f'CPUs {format_list(usable)} only' if usable else 'no CPU'}; name nodes and CPUs"
            " that it may use"
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
    """Make a rank's Binding, which is not applied yet; None if nothing is to be bound.

    `num_threads` is the number of computing threads of this rank; None means one per physical core
    of the part, but at most `most_threads` if given. `num_engines` is the number of engines that
    share these nodes, including this engine. Raises ConfigurationError.
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
    """Binds one rank's threads and memory to its part, as far as the system allows.

    Invariant: after the system has refused a memory call, one line is logged and no more memory
    calls are made.
    """

    def __init__(
        self,
        part: Part,
        topology: Topology,
        num_threads: int,
        *,
        calls: LinuxCalls | None = None,
        respects_policy: bool = True,
        regions: Callable[[], list[Region]] | None = None,
    ) -> None:
        """If `respects_policy`, a memory policy set when the process started, for example by
        numactl, is kept. `regions` lists memory that may hold weights; None: this process's memory.
        """
        self.part = part
        #: Number of computing threads.
        self.num_threads = num_threads
        #: Whether the machine has memory nodes outside the part.
        self.leaves_nodes = not set(topology.memory_nodes) <= set(part.memory_nodes)
        self._free_bytes = {
            node.id: node.free_bytes for node in topology.nodes if node.id in part.memory_nodes
        }
        self._respects_policy = respects_policy
        self._binds_memory = bool(part.memory_nodes)
        self._is_strict = True
        self._is_bound = False
        self._regions = regions or partial(anonymous_memory, with_heap=False)
        self.calls: LinuxCalls = calls or LinuxCalls()

    @property
    def binds_memory(self) -> bool:
        """Whether memory is bound: the part has nodes, and no call was refused."""
        return self._binds_memory

    @property
    def free_bytes(self) -> int | None:
        """Bytes of free memory on the part's nodes, divided by the number of parts on them.

        Measured when the topology was read. None if the part has no nodes, because the system shows
        no node with CPUs.
        """
        if not self.part.memory_nodes:
            return None
        return sum(self._free_bytes.values()) // self.part.num_sharing

    @property
    def where(self) -> str:
        """The part's memory nodes in words: "node 0" or "nodes 0-3"."""
        return name_nodes(self.part.memory_nodes)

    def bind_threads(self) -> None:
        """Bind the calling thread. Threads that it starts from now on inherit the binding."""
        cpus = self.part.cpus_for(self.num_threads)
        self._is_bound = False
        try:
            _set_affinity(cpus)
            self._is_bound = True
        except OSError as error:
            logger.warning(
                "numa: threads can't be bound to CPUs %s (%s): they run where the system puts them",
                format_list(cpus),
                error.strerror,
            )

    def expect(self, num_bytes: int) -> None:
        """Set the size of the part's weights and KV cache. If it exceeds the free memory, the
        policy isn't strict, and some pages will lie on other nodes."""
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
        """In the `with` block, this thread and threads that it starts get pages from the part.

        Memory that is mapped in the block keeps this policy for pages written later.
        """
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
        """Make this memory's unwritten pages come from the part, whichever thread writes them.

        Memory that another thread has unmapped in the meantime is skipped.
        """
        self._try(
            lambda: self.calls.set_range_policy(address, num_bytes, self._policy, self._targets)
        )

    def log(self) -> None:
        """Log the CPUs and memory nodes to which this process is bound."""
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
            return MemoryPolicy.INTERLEAVE  # falls back to other nodes if these are full
        return MemoryPolicy.BIND if self._is_strict else MemoryPolicy.PREFERRED

    @property
    def _targets(self) -> tuple[int, ...]:
        return self.part.memory_nodes

    def _may_bind(self) -> bool:
        """Whether memory may be bound: no call was refused, and no earlier policy must be kept."""
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
            if error.errno == errno.EFAULT:  # the memory was unmapped meanwhile
                return
            self._binds_memory = False
            hint = ""
            if error.errno in REFUSALS:
                hint = "; in a container it takes the capability SYS_NICE"
            logger.warning(
                "numa: memory can't be bound to %s, since %s is refused (%s%s): threads stay on the"
                " part's CPUs, and a page lies on the node of the thread that first writes it",
                self.where,
                error.filename or "a system call",
                error.strerror,
                hint,
            )


def name_nodes(nodes: Collection[int]) -> str:
    """The nodes in words: "node 0", "nodes 0-3" or "any node"."""
    if not nodes:
        return "any node"
    return f"node{'s' if len(nodes) > 1 else ''} {format_list(nodes)}"


class _BoundThread(threading.local):
    """The CPUs that the calling thread may use, before and after it was bound."""

    #: (CPUs allowed before the binding, CPUs of the binding); None if the thread is not bound.
    before: tuple[set[int], set[int]] | None = None


_thread = _BoundThread()


def _set_affinity(cpus: Collection[int]) -> None:
    allowed = unbound_cpus()
    os.sched_setaffinity(0, cpus)
    _thread.before = allowed, set(cpus)


def unbound_cpus() -> set[int]:
    """The CPUs that the calling thread could use without the binding of an earlier engine."""
    now, before = os.sched_getaffinity(0), _thread.before
    return before[0] if before is not None and before[1] == now else now


def unbind_threads() -> None:
    """Undo the calling thread's binding by an earlier engine of this process."""
    allowed = unbound_cpus()
    if allowed != os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)
