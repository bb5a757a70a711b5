"""Move states on token by token in a step that verifies drafts.

A recording of several tokens of each text has a row for each token. What it computes is right for
each row alone, but the state of a recurrence depends on the row before. `with_states_in_turn`
takes what moves a state on from the recording of one token, once for each token. Everything else
still runs for all rows at once.

The state after each token is kept in a tensor of its own. Which one holds is known when the drafts
were verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mirage_hf.trace.order import dependencies
from mirage_hf.trace.record import (
    Input,
    Meta,
    Node,
    Recording,
    TraceError,
    Value,
    readers_of,
)
from mirage_hf.trace.short_convolution import with_short_convolutions
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.whole_writes import without_whole_writes

_ATEN = torch.ops.aten


def kept_name(state: str, token: int) -> str:
    """Return the name of the input that keeps a state after a token."""
    return f"{state}@{token}"


def with_states_in_turn(
    several: Recording, one: Recording, batch: int, states: Sequence[str]
) -> Recording:
    """Return a recording of several tokens of each text whose states move on token by token.

    Args:
        several: The recording of several tokens, as if each row had a state of its own.
        one: The recording of one token of each text.
        batch: The number of texts.
        states: The names of the states.

    Raises:
        TraceError: What moves a state on is not the same in both.
    """
    several = with_short_convolutions(without_whole_writes(several))
    one = with_short_convolutions(without_whole_writes(one))
    rows = several.inputs[states[0]].shape[0]
    chains = [
        Chain(state, _moving(several, Input(state)), _moving(one, Input(state))) for state in states
    ]
    return _Merger(several, one, batch, rows // batch, chains).merged()


@dataclass(frozen=True)
class Chain:
    """What moves a state on.

    Attributes:
        state: The name of the state.
        several: The numbers of the nodes in the recording of several tokens.
        one: The numbers of the nodes in the recording of one token.
    """

    state: str
    several: list[int]
    one: list[int]


def _moving(recording: Recording, state: Input) -> list[int]:
    """Return the nodes between the read of a state and its write, and those that reduce it.

    A tensor as large as the state is never made for all rows at once.
    """
    nodes, meta = recording.nodes, recording.meta(state)
    size = _size(meta)
    from_state: set[int] = set()
    for number, node in enumerate(nodes):
        if any(x == state or _is_in(x, from_state) for x in node.operands):
            from_state.add(number)
    writes = {n for n, node in enumerate(nodes) if meta.storage in node.written}
    needed, waiting = set(writes), [*writes]
    while waiting:
        for x in nodes[waiting.pop()].operands:
            if isinstance(x, Value) and x.node not in needed:
                needed.add(x.node)
                waiting.append(x.node)
    members = from_state & needed
    large = {n for n in members if _size(nodes[n].outputs[0]) >= size}
    for number in sorted(from_state - members):
        if any(x == state or _is_in(x, large) for x in nodes[number].operands):
            members.add(number)
            if _size(nodes[number].outputs[0]) >= size:
                large.add(number)
    return sorted(members)


def _is_in(x: Any, numbers: set[int]) -> bool:
    return isinstance(x, Value) and x.node in numbers


def _size(meta: Meta | None) -> int:
    shape = None if meta is None else fixed_shape(meta)
    return 0 if shape is None else math.prod(shape)


class _Merger:
    """Makes the recording."""

    def __init__(
        self, several: Recording, one: Recording, batch: int, tokens: int, chains: Sequence[Chain]
    ):
        self.several, self.one, self.batch, self.tokens = several, one, batch, tokens
        self.chains = chains
        self.nodes: list[Node] = []
        self.inputs = dict(several.inputs)
        #: What the values of `several` are called.
        self.names: dict[Value, Value] = {}
        #: The parts of tensors of `several`, by tensor and token.
        self._parts: dict[tuple[Any, int], Value] = {}
        storages = [m.storage for m in (*several.inputs.values(), *several.held.values())]
        storages += [m.storage for n in several.nodes for m in n.outputs if m is not None]
        self._next_storage = max(storages) + 1

    def merged(self) -> Recording:
        """Return the recording.

        Raises:
            TraceError: What moves a state on is not the same in both recordings.
        """
        for chain in self.chains:
            self._check(chain)
            meta = self.one.inputs[chain.state]
            self.inputs[chain.state] = replace(meta, storage=self.inputs[chain.state].storage)
            for token in range(self.tokens):
                name = kept_name(chain.state, token)
                self.inputs[name] = replace(meta, storage=self._new_storage())
        for group in self._in_order():
            if isinstance(group, Chain):
                self._add_chain(group)
            else:
                node = self.several.nodes[group]
                number = self._add(self._renamed(node))
                for output in range(len(node.outputs)):
                    self.names[Value(group, output)] = Value(number, output)
        held = {key: replace(m, storage=self._new_storage()) for key, m in self.one.held.items()}
        held |= self.several.held
        moves = {
            kept_name(chain.state, token): self._before(chain.state, token)
            for chain in self.chains
            for token in range(self.tokens)
        }
        return replace(self.several, nodes=self.nodes, inputs=self.inputs, held=held, moves=moves)

    def _check(self, chain: Chain) -> None:
        nodes = [
            [recording.nodes[n] for n in numbers]
            for recording, numbers in ((self.several, chain.several), (self.one, chain.one))
        ]
        names = [[node.name for node in each] for each in nodes]
        if not names[0] or names[0] != names[1]:
            raise TraceError(f"{chain.state} moves on in another way with several rows")
        own = {self.one.inputs[chain.state].storage}
        for node in nodes[1]:
            if not node.written <= own:
                raise TraceError(f"{node.where} writes another tensor than {chain.state}")
            made = {meta.storage for meta in node.outputs if meta is not None}
            own |= made - {self.one.meta(x).storage for x in node.operands}

    def _in_order(self) -> Iterator[int | Chain]:
        """Yield nodes and chains so that each comes after those that it needs."""
        needs = dependencies(self.several)
        chain_of = {n: chain for chain in self.chains for n in chain.several}
        missing = {
            id(chain): {x for n in chain.several for x in needs[n]} - {*chain.several}
            for chain in self.chains
        }
        done: set[int] = set()
        left = [*range(len(self.several.nodes))]
        while left:
            later = []
            for number in left:
                chain = chain_of.get(number)
                if number in done:
                    continue
                if not (needs[number] if chain is None else missing[id(chain)]) <= done:
                    later.append(number)
                    continue
                yield number if chain is None else chain
                done.update([number] if chain is None else chain.several)
            if later == left:
                raise TraceError("what moves its states on needs itself")
            left = later

    # -- nodes

    def _add(self, node: Node) -> int:
        """Add a node, and return its number."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _renamed(self, node: Node) -> Node:
        def named(x: Any) -> Any:
            return self.names[x] if isinstance(x, Value) else x

        return replace(node, args=_mapped(node.args, named), kwargs=_mapped(node.kwargs, named))

    def _new_storage(self) -> int:
        self._next_storage += 1
        return self._next_storage

    def _op(self, op: Any, args: tuple[Any, ...], meta: Meta, where: str) -> Value:
        """Add a node whose result is a tensor of its own."""
        fresh = replace(meta, storage=self._new_storage())
        return Value(self._add(Node(op, args, {}, [fresh], where)))

    # -- chains

    def _before(self, state: str, token: int) -> str:
        """Return the name of the state that a token reads."""
        return kept_name(state, token - 1) if token else state

    def _add_chain(self, chain: Chain) -> None:
        """Add the nodes of a chain for each token, and what other nodes read of all tokens."""
        makes_next = self._makes_next(chain)
        made: list[dict[Value, Value]] = []
        for token in range(self.tokens):
            read, kept = self._before(chain.state, token), kept_name(chain.state, token)
            names: dict[Any, Any] = {}
            storages = {self.one.inputs[chain.state].storage: self.inputs[kept].storage}
            if not makes_next:  # what moves it on in place moves a copy on
                meta = self.inputs[kept]
                self._add(
                    Node(
                        _ATEN.copy_.default,
                        (Input(kept), Input(read)),
                        {},
                        [meta],
                        "the copy of a state",
                        frozenset({meta.storage}),
                    )
                )
                read = kept
            for several, one in zip(chain.several, chain.one, strict=True):
                self._add_token(chain, several, one, token, (read, kept), names, storages)
            made.append(names)
        self._join(chain, made)

    def _makes_next(self, chain: Chain) -> bool:
        """Return whether a chain reads its state, and writes all of it at its end."""
        nodes, state = self.one.nodes, Input(chain.state)
        storage = self.one.inputs[chain.state].storage
        writes = [n for n in chain.one if storage in nodes[n].written]
        if len(writes) != 1 or nodes[writes[0]].name != "aten.copy_":
            return False
        (write,) = writes
        readers = readers_of(nodes)
        is_last = all(n <= write for n in readers[state])
        return nodes[write].args[0] == state and is_last and Value(write) not in readers

    def _add_token(
        self,
        chain: Chain,
        several: int,
        one: int,
        token: int,
        states: tuple[str, str],
        names: dict[Any, Any],
        storages: dict[int, int],
    ) -> None:
        """Add a node of a chain for one token.

        Args:
            chain: The chain.
            several: The node in the recording of several tokens.
            one: The node in the recording of one token.
            token: The number of the token.
            states: The names of the state that is read, and of the one that is written.
            names: What values of the chain are called for this token, which is added to.
            storages: Likewise for storages.
        """
        node, other = self.one.nodes[one], self.several.nodes[several]
        read, kept = states
        state = Input(chain.state)
        written = node.written and node.args and node.args[0] == state

        def argument(x: Any, y: Any, is_first: bool) -> Any:
            """Return an argument, from those of one token and of several."""
            if isinstance(x, (tuple, list)):
                if not isinstance(y, (tuple, list)) or len(x) != len(y):
                    raise TraceError(f"{node.where} gets other arguments with several rows")
                return type(x)([argument(*pair, False) for pair in zip(x, y, strict=True)])
            if x == state:
                return Input(kept if is_first and written else read)
            if isinstance(x, Value) and x in names:
                return names[x]
            if not isinstance(x, (Value, Input)):
                return x
            if not isinstance(y, (Value, Input)):
                raise TraceError(f"{node.where} gets other arguments with several rows")
            part = self._part(y, token, self.one.meta(x))
            storages[self.one.meta(x).storage] = self._meta(part).storage
            return part

        pairs = zip(node.args, other.args, strict=True)
        args = tuple(argument(*pair, not n) for n, pair in enumerate(pairs))
        kwargs = {k: argument(v, other.kwargs.get(k), False) for k, v in node.kwargs.items()}
        metas: list[Meta | None] = []
        for meta in node.outputs:
            if meta is not None and meta.storage not in storages:
                storages[meta.storage] = self._new_storage()
            metas.append(None if meta is None else replace(meta, storage=storages[meta.storage]))
        moved = frozenset(storages[s] for s in node.written)
        number = self._add(Node(node.op, args, kwargs, metas, node.where, moved))
        for output in range(len(node.outputs)):
            names[Value(one, output)] = Value(number, output)

    def _meta(self, x: Value | Input) -> Meta:
        if isinstance(x, Input):
            return self.inputs[x.name]
        meta = self.nodes[x.node].outputs[x.output]
        assert meta is not None
        return meta

    def _part(self, x: Value | Input, token: int, wanted: Meta) -> Value | Input:
        """Return the rows of one token of each text, of a tensor with a row for each token."""
        named = self.names[x] if isinstance(x, Value) else x
        meta = self._meta(named)
        if meta.shape == wanted.shape:
            return named
        if (x, token) not in self._parts:
            dim, inner = self._rows(meta, wanted)
            where = "the rows of a token"
            before, after = meta.shape[:dim], meta.shape[dim + 1 :]
            split = (*before, self.batch, self.tokens, inner, *after)
            chosen = (*before, self.batch, inner, *after)
            parts = self._op(_ATEN.view.default, (named, [*split]), _of(meta, split), where)
            part = self._op(_ATEN.select.int, (parts, dim + 1, token), _of(meta, chosen), where)
            shape = wanted.shape
            whole = self._op(_ATEN.view.default, (part, [*shape]), _of(meta, shape), where)
            self._parts[x, token] = whole
        return self._parts[x, token]

    def _join(self, chain: Chain, made: Sequence[dict[Value, Value]]) -> None:
        """Add the tensors of all rows that nodes outside of a chain read."""
        own = set(chain.several)
        readers = readers_of(self.several.nodes)
        for several, one in zip(chain.several, chain.one, strict=True):
            for output, meta in enumerate(self.several.nodes[several].outputs):
                value, of_one = Value(several, output), Value(one, output)
                if meta is None or own.issuperset(readers.get(value, ())):
                    continue
                single = self.one.meta(of_one)
                dim, inner = self._rows(meta, single)
                shape = (*single.shape[:dim], self.batch, inner, *single.shape[dim + 1 :])
                where = "the rows of all tokens"
                parts = [
                    self._op(_ATEN.view.default, (names[of_one], [*shape]), _of(meta, shape), where)
                    for names in made
                ]
                stacked = (*shape[: dim + 1], self.tokens, *shape[dim + 1 :])
                joined = self._op(_ATEN.stack.default, (parts, dim + 1), _of(meta, stacked), where)
                self.names[value] = self._op(
                    _ATEN.view.default, (joined, [*meta.shape]), _of(meta, meta.shape), where
                )

    def _rows(self, several: Meta, one: Meta) -> tuple[int, int]:
        """Return the dim that holds rows, and how many elements of it each row has.

        Raises:
            TraceError: No dim does.
        """
        pairs = [*zip(several.shape, one.shape, strict=False)]
        differing = [d for d, (m, n) in enumerate(pairs) if m != n]
        if len(several.shape) == len(one.shape) and len(differing) == 1:
            (dim,) = differing
            of_all, of_one = pairs[dim]
            if of_all == self.tokens * of_one and of_one % self.batch == 0:
                return dim, of_one // self.batch
        raise TraceError("the rows of a tensor that moves a state on are not known")


def _of(meta: Meta, shape: Iterable[Any]) -> Meta:
    """Return what is known of a contiguous tensor of this shape."""
    dims = tuple(shape)
    return replace(
        meta, shape=dims, strides=tuple(math.prod(dims[n + 1 :]) for n in range(len(dims)))
    )


def _mapped(x: Any, function: Any) -> Any:
    """Return arguments with what a function returns for each leaf."""
    if isinstance(x, (tuple, list)):
        return type(x)([_mapped(each, function) for each in x])
    if isinstance(x, dict):
        return {name: _mapped(each, function) for name, each in x.items()}
    return function(x)
