"""The authority over the cluster map (pure): who has which bucket, when a server comes or goes.

A step changes each bucket at most once, and gives it a new term. Rows move in two steps: a server
becomes a *learner*, and when the primary says that the learner has every acknowledged push, it
becomes a backup or replaces a member. So at every moment one server may acknowledge.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.ps.cluster_map import AckMode, ClusterMap, CutPlace, Placement, Replacing, Steps
from dlrover_py.ps.specs import NAME, Consistency, TableSpec, check_consistency, check_table
from dlrover_py.ps.spread import Spread, after, backups_after, unevenness_of

MAX_TABLES = 1024
MAX_CLIENTS = 65536


@dataclass(frozen=True, slots=True)
class PlanRules:
    """How a job wants its buckets kept."""

    buckets: int = 64
    """Number of buckets, which never changes."""
    servers: int = 1
    """Desired number of servers."""
    replicas: int = 2
    """Copies of each bucket: 1 or 2."""
    ack: AckMode = AckMode.BACKUP
    silence_s: float = 3.0
    """Seconds without a message after which a server counts as lost."""
    return_s: float = 30.0
    """Seconds that servers and workers of a stored map have to connect to the next coordinator.

    In a cluster they must first notice the end of the last one. Then Kubernetes must find that the
    new master is ready, and tell all hosts its address."""
    moves: int = 8
    """Buckets that move at the same time to balance servers."""
    least: int | None = None
    """Servers that must have come before buckets are placed. None: all that are desired."""
    standbys: int = 0
    """Servers beyond the desired ones, which have no buckets while these run. With 0, buckets are
    on all servers."""

    def check(self) -> None:
        """Check the rules.

        Raises:
            ConfigError: A number is outside its bounds.
        """
        if not 1 <= self.buckets <= 1 << 16:
            raise ConfigError(f"expected 1 to 65536 buckets, found {self.buckets}")
        if self.replicas not in (1, 2):
            raise ConfigError(f"expected 1 or 2 replicas, found {self.replicas}")
        if self.servers < 1:
            raise ConfigError(f"expected at least 1 server, found {self.servers}")
        if self.silence_s <= 0:
            raise ConfigError(f"expected a silence of more than 0 s, found {self.silence_s}")


class Planner:
    """Owns the map. Its caller stores each new map before anyone sees it."""

    def __init__(self, start: ClusterMap, rules: PlanRules, now: float) -> None:
        """Take over a map.

        Args:
            start: An empty map, or the one that an earlier planner has stored.
            rules: How buckets are kept.
            now: The time in seconds. Servers of the map have ``return_s`` to be heard.
        """
        self.map = start
        self.rules = rules
        self._used: dict[str, tuple[int, set[str]]] = {}
        """The incarnation of each worker, and the tables that it has asked this planner for.

        The map may have others: of a cut, or of workers that have ended."""
        self._until: dict[str, float] = {}
        """When each server counts as lost, unless it is heard before."""
        self._ended: set[str] = set()
        """Servers whose processes have ended. Their ids are not used again."""
        self._waits = False
        """Whether all servers were silent at once, and none was heard since."""
        self.wait_for_all(now)

    def wait_for_all(self, now: float) -> None:
        """Give all servers ``return_s`` from now on to be heard: they must connect first."""
        until = now + max(self.rules.return_s, self.rules.silence_s)
        self._until = dict.fromkeys(self.map.servers, until)

    @property
    def draining(self) -> frozenset[str]:
        """The servers that give their buckets away."""
        return frozenset(self.map.draining)

    @property
    def targets(self) -> list[str]:
        """The servers that may get buckets: all others give theirs away, if they have any.

        With standbys, they are as many as are desired: first those that have buckets, then those
        that came first. So the standby that takes the place of a lost server keeps it.
        """
        staying = set(self.map.servers) - self.draining
        if self.rules.standbys:
            having = {name for one in self.map.placements if not one.lost for name in after(one)}
            order = sorted(staying, key=lambda one: (one not in having, id_key(NodeId(one)), one))
            staying = set(order[: self.rules.servers])
        return sorted(staying)

    def heard(self, server: str, address: str, now: float) -> None:
        """Note that a server runs.

        Args:
            server: Id of this life of the server; a restarted server has another one.
            address: Where it is reached.
            now: The time in seconds.
        """
        if server in self._ended:
            return  # the message was on its way when the process ended
        self._hears(now)
        self._until[server] = now + self.rules.silence_s
        if self.map.servers.get(server) != address:
            self._set(servers=self.map.servers | {server: address})
            self._plan()

    def beat(self, server: str, now: float) -> None:
        """Note that the process of a server runs, whatever its thread does.

        Args:
            server: Id of this life of the server. It counts only while it is in the map.
            now: The time in seconds.
        """
        if server in self.map.servers:
            self._hears(now)
            self._until[server] = max(self._until[server], now + self.rules.silence_s)

    def _hears(self, now: float) -> None:
        """End the wait for all servers, because one is heard: the others have the usual time."""
        if self._waits:
            self._waits, until = False, now + self.rules.silence_s
            self._until = {name: min(old, until) for name, old in self._until.items()}

    def expect(self, servers: int, *, least: int | None = None, standbys: int = 0) -> None:
        """Take other numbers of servers.

        Args:
            servers: The desired number; 0 counts as 1.
            least: How many must have come before buckets are placed. None: all that are desired.
            standbys: Further servers, which have no buckets while the desired ones run.
        """
        self.rules = replace(self.rules, servers=max(1, servers), least=least, standbys=standbys)
        self._plan()

    def lost(self, server: str) -> None:
        """Note that the process of a server has ended, with all its rows."""
        self._ended.add(server)
        if server in self.map.servers:
            self._remove([server])
        if any(_loses(one, server) for one in self.map.placements):
            self._place([_lost(one) if _loses(one, server) else one for one in self.map.placements])

    def tick(self, now: float) -> None:
        """Take note of the time: a server that was silent for too long counts as lost.

        A bucket whose only copy it has stays with it, because it may come back. If all servers are
        silent at once, this program may be cut off. They have ``return_s`` then, because they would
        give up their second copies, and serve workers meanwhile.
        """
        silent = [server for server in self.map.servers if now > self._until[server]]
        if len(silent) == len(self.map.servers) > 1 and not self._waits:
            self._waits = True
            self.wait_for_all(now)
        elif silent:
            self._remove(silent)

    def drain(self, server: str) -> None:
        """Move all buckets away from a server that wants to leave."""
        if server in self.map.servers and server not in self.map.draining:
            self._set(draining=(*self.map.draining, server))
            self._plan()

    def weigh(self, weights: Sequence[int]) -> None:
        """Even the servers by the weights of their buckets, from now on.

        Buckets move as when a server comes: few at a time, and no copy is given up before its
        successor has the rows. A later planner goes on with the same weights.

        Args:
            weights: How much each bucket counts, at least 1.
        """
        self._set(weights=tuple(weights))
        self._plan()

    def rebalanced(self, request: str) -> None:
        """Note that a request of a user to even the servers is answered."""
        self._set(rebalanced=request)

    def create_table(self, spec: TableSpec, client: str = "", incarnation: int = 0) -> None:
        """Add a table, if it does not exist.

        Args:
            spec: The table.
            client: Name of the worker that uses it; empty if no worker does.
            incarnation: Incarnation of the worker. What an older one uses does not count.

        Raises:
            ConfigError: The table is malformed, or differs from the existing one of its name.
        """
        check_table(spec)
        known = self.map.table(spec.name)
        if incarnation and incarnation == self.map.clients.get(client):
            before, used = self._used.get(client, (0, set()))
            self._used[client] = incarnation, {*(used if before == incarnation else ()), spec.name}
        if known is None:
            if len(self.map.tables) >= MAX_TABLES:
                raise ConfigError(f"expected at most {MAX_TABLES} tables")
            self._set(tables=(*self.map.tables, spec))
        elif known != spec:
            raise ConfigError(
                f"table {spec.name} exists with other properties: expected {known}, found {spec}; "
                "give the new table another name"
            )

    def use(self, consistency: Consistency) -> None:
        """Order the steps of all workers, from now on.

        Raises:
            ConfigError: It is malformed, or workers use another one.
        """
        check_consistency(consistency)
        known = self.map.steps.consistency
        if known is None:
            self._set(steps=replace(self.map.steps, consistency=consistency))
        elif known != consistency:
            raise ConfigError(f"the workers of this job use {known}: expected no {consistency}")

    def step(self, steps: Steps, gone: tuple[str, ...]) -> None:
        """Take note of what workers have ended.

        Args:
            steps: The state of their steps.
            gone: Workers whose rights end, because the others go on without them.
        """
        if steps is not self.map.steps or gone:
            later = dict.fromkeys(gone, self.map.epoch + 1)
            self._set(steps=steps, clients=self.map.clients | later)

    def join(self, client: str, call: str) -> int:
        """Return the incarnation of a worker that begins now; it ends the rights of older ones.

        Args:
            client: The worker's name.
            call: Its call. If the last one is repeated, nothing changes.

        Raises:
            ConfigError: The name is malformed, or there are too many workers.
        """
        if not NAME.fullmatch(client):
            raise ConfigError(f"expected a worker's name of letters, digits and _.-: {client!r}")
        if len(self.map.clients) >= MAX_CLIENTS and client not in self.map.clients:
            raise ConfigError(f"expected at most {MAX_CLIENTS} workers")
        if self.map.calls.get(client) == call:
            return self.map.clients[client]
        calls = self.map.calls | {client: call}
        self._set(clients=self.map.clients | {client: self.map.epoch + 1}, calls=calls)
        return self.map.epoch

    def synced(self, sender: str, bucket: int, term: int, learner: str) -> None:
        """Note that a learner has every push that was acknowledged, and will have each next one.

        Args:
            sender: The server that says so: it must be the primary.
            bucket: The bucket.
            term: The term in which it says so. An older one is ignored.
            learner: The server with the rows.
        """
        if not 0 <= bucket < len(self.map.placements):
            return
        old = self.map.placements[bucket]
        if (old.term, old.primary, old.learner) != (term, sender, learner):
            return
        placements = list(self.map.placements)
        placements[bucket] = _with_learner(old)
        self._place(placements)
        self._plan()

    def catch_up(self) -> None:
        """Take all learners of running primaries for members, as if each had all rows."""
        self._place(
            [
                _with_learner(one) if one.learner and one.primary in self.map.servers else one
                for one in self.map.placements
            ]
        )
        self._plan()

    # --- Cuts ---

    def begin_cut(self, place: CutPlace) -> None:
        """Let the primaries write their buckets, and apply no push meanwhile."""
        self._set(cut=place)

    def end_cut(
        self, saved: Mapping[str, tuple[int, int]] | None = None, *, origin: bool = False
    ) -> None:
        """Let the primaries apply pushes again.

        Args:
            saved: If the cut exists now, the calls of the workers that made it: incarnation and
                number.
            origin: Whether the training begins with it.
        """
        made, known = self.map.cut, self.map
        if made is not None and saved is not None:
            first = made if origin else known.origin
            self._set(cut=None, source=made, origin=first, met=dict(saved))
        elif made is not None:
            self._set(cut=None)

    def restore(
        self,
        source: CutPlace,
        tables: tuple[TableSpec, ...],
        buckets: int,
        staying: Collection[str],
        new: Collection[str] = (),
        *,
        origin: bool = False,
        met: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Go back to a cut with all buckets: what came after it does not count any more.

        Args:
            source: The cut.
            tables: Its tables.
            buckets: Its number of buckets.
            staying: Workers that may push afterwards. All others are refused from now on.
            new: Tables that are not in the cut, and are not a table of the cut with another name.
            origin: Whether the training begins with it, unless it began with another one.
            met: The calls of the workers that go back: incarnation and number.

        Raises:
            ConfigError: The tables or buckets of the job differ from those of the cut, or a table
                may have been renamed.
        """
        if buckets != len(self.map.placements):
            raise ConfigError(
                f"the cut has {buckets} buckets, the servers have {len(self.map.placements)}: "
                "expected equal numbers"
            )
        for table in tables:
            known = self.map.table(table.name)
            if known is not None and known != table:
                raise ConfigError(
                    f"table {table.name} was saved with other properties: expected {table}, found "
                    f"{known}"
                )
        later = self.map.epoch + 1
        names = {table.name for table in tables}
        used = {
            table
            for name, (incarnation, found) in self._used.items()
            if name in staying and incarnation == self.map.clients[name]
            for table in found
        }
        absent, unused = used - names - set(new), names - used
        if absent and unused:
            raise ConfigError(
                f"the cut has no table {', '.join(sorted(absent))}, and this job does not use its "
                f"table {', '.join(sorted(unused))}: expected the same names. If the first one is "
                f"new, and not renamed: ps.restore(new={sorted(absent)})"
            )
        self._set(
            tables=(*tables, *(table for table in self.map.tables if table.name not in names)),
            clients={
                name: old if name in staying else later for name, old in self.map.clients.items()
            },
            source=source,
            origin=self.map.origin or (source if origin else None),
            met=dict(met or {}),
            restored=later,
            cut=None,
            placements=tuple(
                Placement(one.term + 1, one.primary, loading=True) for one in self.map.placements
            ),
        )
        self._plan()

    def loaded(self, sender: str, bucket: int, term: int) -> None:
        """Note that a primary has read its rows from the cut: it leads the bucket from now on.

        Args:
            sender: The server that says so.
            bucket: The bucket.
            term: The term in which it says so. Another one is ignored.
        """
        if not 0 <= bucket < len(self.map.placements):
            return
        old = self.map.placements[bucket]
        if old.loading and (old.term, old.primary) == (term, sender):
            placements = list(self.map.placements)
            placements[bucket] = replace(old, term=term + 1, loading=False)
            self._place(placements)
            self._plan()

    # --- The plan ---

    def _set(self, **fields: object) -> None:
        self.map = replace(self.map, epoch=self.map.epoch + 1, **fields)  # type: ignore[arg-type]

    def _place(self, placements: list[Placement]) -> None:
        if tuple(placements) != self.map.placements:
            self._set(placements=tuple(placements))

    def _remove(self, servers: list[str]) -> None:
        """Take servers out of the map, promote backups of their buckets, and plan again.

        A bucket without a backup keeps its primary, unless it is loading from a cut.
        """
        for server in servers:
            self._until.pop(server, None)
        left = {name: at for name, at in self.map.servers.items() if name not in servers}
        draining = tuple(server for server in self.map.draining if server in left)
        self._set(servers=left, draining=draining)
        self._place([self._without(one) for one in self.map.placements])
        self._plan()

    def _without(self, old: Placement) -> Placement:
        """Return a placement without the members that are not in the map."""
        alive = self.map.servers
        backups = tuple(backup for backup in old.backups if backup in alive)
        learner = old.learner if old.learner in alive else ""
        primary = old.primary
        if primary not in alive and backups:
            primary, backups, learner = backups[0], backups[1:], ""
        replacing = old.replacing if learner else Replacing.NOTHING
        if replacing is Replacing.BACKUP and not backups:
            replacing = Replacing.NOTHING
        new = replace(old, primary=primary, backups=backups, learner=learner, replacing=replacing)
        return old if new == old else replace(new, term=old.term + 1)

    def _plan(self) -> None:
        """Place buckets for the first time, replace missing copies, then balance the servers.

        What needs no copy, such as a backup that becomes the primary, may allow the next step. So
        steps follow until one changes nothing. They end: each makes servers more even or emptier.
        """
        targets = self.targets
        while self.map.placements != self._plan_step(targets):
            pass

    def _plan_step(self, targets: list[str]) -> tuple[Placement, ...]:
        """Change each bucket at most once; return the placements.

        Args:
            targets: The servers that may get buckets.
        """
        if not self.map.placements:
            rules = self.rules
            if len(targets) >= (rules.servers if rules.least is None else rules.least):
                self._place([self._first(bucket, targets) for bucket in range(self.rules.buckets)])
            return self.map.placements
        placements = list(self.map.placements)
        spread = Spread(self.map, targets)
        for bucket, one in enumerate(placements):
            if one.loading and one.primary not in self.map.servers and targets:
                chosen = min(targets, key=lambda server: (spread.led[server], server))
                spread.lead(chosen, bucket)
                placements[bucket] = replace(one, term=one.term + 1, primary=chosen)
        self._replace_copies(placements, targets, spread)
        if not self._balance(placements, targets, spread, coarse=False):
            self._balance(placements, targets, spread, coarse=True)
        self._place(placements)
        return self.map.placements

    def _first(self, bucket: int, targets: list[str]) -> Placement:
        count = len(targets)
        primary = bucket % count
        if self.map.source is not None:
            return Placement(1, targets[primary], loading=True)
        backups: tuple[str, ...] = ()
        if self.rules.replicas > 1 and count > 1:
            backups = (targets[(primary + 1 + bucket // count % (count - 1)) % count],)
        return Placement(1, targets[primary], backups)

    def _replace_copies(
        self, placements: list[Placement], targets: list[str], spread: Spread
    ) -> None:
        for bucket, one in enumerate(placements):
            if (
                len(one.backups) + 1 >= self.rules.replicas
                or one.primary not in self.map.servers
                or one.learner
                or one.loading
            ):
                continue
            fit = [server for server in targets if server not in one.members]
            if fit:
                chosen = min(fit, key=lambda server: (spread.copies[server], server))
                spread.copies[chosen] += 1
                placements[bucket] = replace(one, term=one.term + 1, learner=chosen)

    def _balance(
        self, placements: list[Placement], targets: list[str], spread: Spread, *, coarse: bool
    ) -> bool:
        """Move primaries, then backups, from full servers to empty ones, few at a time.

        Args:
            placements: The placements, which are changed.
            targets: Servers that may get buckets.
            spread: What each server has.
            coarse: Whether heavy buckets may move that even the loads a little only.

        Returns:
            Whether a bucket was changed, or could not be, because enough of them move.
        """
        moves = sum(  # what a silent server has alone does not move until it comes back
            one.replacing is not Replacing.NOTHING and one.primary in self.map.servers
            for one in placements
        )
        changed = False
        for bucket in spread.order(coarse=coarse):
            one = placements[bucket]
            if moves >= self.rules.moves or not targets:
                return True
            if one.learner or one.loading or one.primary not in self.map.servers:
                continue
            new = spread.better(bucket, one, coarse=coarse)
            if new is not None:
                spread.move(bucket, one, new)
                moves += new.replacing is not Replacing.NOTHING
                placements[bucket] = replace(new, term=one.term + 1)
                changed = True
        return changed


def foresee(known: ClusterMap, rules: PlanRules, weights: Sequence[int]) -> ClusterMap:
    """Return the map as it would be when all moves are over that some weights lead to.

    Args:
        known: The present map.
        rules: How buckets are kept. With many buckets, more of them move at once than the rules
            say, so that the result is known soon; the real moves may then differ a little.
        weights: How much each bucket counts.
    """
    moves = max(rules.moves, len(known.placements) // 8)
    planner = Planner(known, replace(rules, moves=moves), 0.0)
    planner.weigh(weights)
    while any(one.learner and one.primary in known.servers for one in planner.map.placements):
        planner.catch_up()
    return planner.map


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the weights of buckets lead to."""

    busiest: float
    """The load of the busiest server now, as a multiple of the mean."""
    later: float
    """The load of the busiest server when all moves are over, as a multiple of the mean."""
    map: ClusterMap
    """The map when all moves are over: the present one if nothing is worth a move."""
    moves: bool
    """Whether buckets should move."""


def outlook(
    known: ClusterMap, rules: PlanRules, weights: Sequence[int], least_gain: float
) -> Outlook:
    """Return whether the servers should be evened by some weights, and what follows.

    Args:
        known: The present map.
        rules: How buckets are kept.
        weights: How much each bucket counts.
        least_gain: Least decrease of the busiest server's load, as a part of the mean.
    """
    foreseen = foresee(known, rules, weights)
    busiest, later = unevenness_of(known, weights), unevenness_of(foreseen, weights)
    if busiest - later < least_gain:
        return Outlook(busiest, busiest, known, moves=False)
    return Outlook(busiest, later, foreseen, moves=True)


def _loses(one: Placement, server: str) -> bool:
    """Return whether the end of a server loses rows of a bucket that it leads."""
    return one.primary == server and not one.lost and not one.loading


def _lost(one: Placement) -> Placement:
    """Return a bucket whose rows are gone: nothing is copied any more."""
    nothing = Replacing.NOTHING
    return replace(one, term=one.term + 1, learner="", replacing=nothing, lost=True)


def _with_learner(old: Placement) -> Placement:
    """Return the placement of a bucket whose learner has all rows."""
    new = replace(old, term=old.term + 1, learner="", replacing=Replacing.NOTHING)
    if old.replacing is Replacing.PRIMARY:
        return replace(new, primary=old.learner, backups=backups_after(old))
    if old.replacing is Replacing.BACKUP:
        return replace(new, backups=(old.learner,))
    return replace(new, backups=(*old.backups, old.learner))
