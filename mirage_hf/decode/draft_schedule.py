"""How many tokens the next step of a call with drafts takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: How fast earlier steps lose weight: by this factor a step.
MEMORY = 0.92
#: The factor at a probe. What was seen before the pause says little about the text after it.
MEMORY_AT_PROBE = 0.5
#: What is assumed of drafts before any was verified: this share of them is right. It counts like
#: `PRIOR_WEIGHT` drafts. A call begins with the longest step, and a few wrong drafts shorten it.
PRIOR_ACCEPTANCE = 0.8
PRIOR_WEIGHT = 1.5
#: Another number of tokens must be better by this factor to be taken.
ADVANTAGE = 1.03
#: Tokens chosen without drafts before the first probe. Each probe that fails doubles the pause.
FIRST_PAUSE = 8
#: The share of the time that probes may cost if all of them fail. It limits the pause.
PROBE_SHARE = 0.01
#: Steps of a row to be seen before a source that cannot draft again later is given up.
STEPS_BEFORE_GIVING_UP = 6


@dataclass
class Acceptance:
    """What was seen of drafts, the latest with the greatest weight.

    Attributes:
        right: Drafts that were taken.
        wrong: Drafts that were the first wrong one of their step.
        steps: Steps of a row.
        drafted: Those of them that had drafts.
    """

    right: float = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
    wrong: float = (1 - PRIOR_ACCEPTANCE) * PRIOR_WEIGHT
    steps: float = 1.0
    drafted: float = 1.0

    def add(self, rows: Sequence[tuple[int, int]], memory: float = 1.0) -> None:
        """Add a step.

        Args:
            rows: For each row that was alive: the drafts that it verified, and how many it took.
            memory: The weight that earlier steps keep.
        """
        self.steps = memory * self.steps + len(rows)
        self.drafted = memory * self.drafted + sum(verified > 0 for verified, _ in rows)
        if any(verified for verified, _ in rows):
            self.right = memory * self.right + sum(taken for _, taken in rows)
            self.wrong = memory * self.wrong + sum(taken < verified for verified, taken in rows)

    def forget_half(self) -> None:
        """Give what was seen half of its weight. The other half goes to what new calls assume."""
        for name, assumed in vars(Acceptance()).items():
            setattr(self, name, (getattr(self, name) + assumed) / 2)

    def tokens_after(self, drafts: int) -> float:
        """Return how many tokens a row probably gets from a step that verifies so many drafts."""
        rate = self.right / (self.right + self.wrong)
        return 1 + self.drafted / self.steps * sum(rate**n for n in range(1, drafts + 1))


@dataclass
class DraftSchedule:
    """Chooses how many tokens the next step takes, from the share of drafts that were taken.

    A step of 1 + k tokens takes longer than a step of one token. It pays if enough drafts are
    taken. The schedule estimates which share of drafts is right, and takes the number of tokens
    that gives most tokens in a time. If that is one token, nothing is drafted for a while. Then one
    step probes whether drafts are right again.

    The choice depends on tokens alone, and on no clock. So a call that is repeated makes the same
    steps.

    Attributes:
        costs: By the tokens of a step: its time as a multiple of the time of a step of one token.
            If there is only one number, all steps take so many tokens.
        most: The most drafts of a row in a step.
        resumes: Whether there can be drafts again after steps without drafts.
        acceptance: What was seen of drafts.
    """

    costs: Mapping[int, float]
    most: int
    resumes: bool = True
    acceptance: Acceptance = field(default_factory=Acceptance)
    _tokens: int = field(init=False)
    _pause: int = field(init=False, default=FIRST_PAUSE)
    _since_draft: int = field(init=False, default=0)
    _is_probing: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._tokens = max(self.costs)

    def next(self) -> int:
        """Return the tokens of the next step."""
        if self._tokens > 1 or len(self.costs) == 1:
            return self._tokens
        if self.resumes and not self._is_probing and self._since_draft >= self._pause:
            self._is_probing, self._since_draft = True, 0
            return self._probe
        self._since_draft += 1
        return 1

    def observe(self, tokens: int, rows: Sequence[tuple[int, int]]) -> None:
        """Add a step, and choose anew. Steps may be reported some steps late.

        Args:
            tokens: Tokens of the step.
            rows: For each row that was alive: the drafts that it verified, and how many it took.
        """
        if tokens == 1 or len(self.costs) == 1 or not rows:
            return
        self.acceptance.add(rows, MEMORY_AT_PROBE if self._is_probing else MEMORY)
        if self._tokens == 1 and not self.resumes:
            return
        best = self._best()
        if best == 1 and self._is_probing:
            self._pause = min(2 * self._pause, self._longest_pause)
        elif best > 1:
            self._pause = FIRST_PAUSE
        elif self._tokens > 1:
            self._since_draft = 0
        self._tokens, self._is_probing = best, False

    @property
    def _probe(self) -> int:
        return min(tokens for tokens in self.costs if tokens > 1)

    @property
    def _longest_pause(self) -> int:
        excess = self.costs[self._probe] - 1
        return max(FIRST_PAUSE, round(excess / PROBE_SHARE))

    def _best(self) -> int:
        """Return the number of tokens that gives most tokens in a time."""
        values = {
            tokens: self.acceptance.tokens_after(min(tokens - 1, self.most)) / cost
            for tokens, cost in self.costs.items()
        }
        best = max(values, key=lambda n: values[n])
        if values[best] < ADVANTAGE * values[self._tokens]:
            best = self._tokens
        must_go_on = not self.resumes and self.acceptance.steps < STEPS_BEFORE_GIVING_UP
        return self._probe if best == 1 and must_go_on else best
