"""How paged attention's work is cut up; no choice made here changes a bit of the result.

    grid    (kv head, row and query tile, program p)

A tile has ROWS rows, each a (query, head of the GQA group) pair. With many tiles one program walks its whole
row. With few, several programs share a row (split KV) and their partial results are combined.
"""

from dataclasses import dataclass, replace

from paceline.kernels.attention_tiles import GROUP, TILE
from paceline.kernels.operation import cdiv, next_power_of_2
from paceline.kernels.triton_support import TRITON_VERSION, launch_options

# Partial results that the combining kernel loads at a time.
COMBINE_BATCH = 8
# Programs with work for each multiprocessor where several share a row: as many as run at once.
RESIDENT = 3
# The same over an E4M3 cache.
FP8_RESIDENT = 4
# Programs launched for each multiprocessor where several share a row; those without groups cost little.
LAUNCHED = 8
# (query, head of the group) pairs per program. A tensor core takes 8, and 16 share what is read of the cache.
MIN_ROWS = 8
MAX_ROWS = 16
# Groups of keys up to which the nodes of a tree share little: most of what they read is each one's own.
OWN_KEYS_GROUPS = 4
# The same where all nodes of a tree share the keys of the groups before theirs, which are read once.
FAR_ROWS = 64
# The same of a program that walks its whole row: with twice as many it takes twice as long.
FOLDED_FAR_ROWS = 32


@dataclass(frozen=True)
class Launch:
    """How the work of one call is cut up."""

    # Programs per row, query tile and kv head, at most.
    programs: int
    # Tiles in flight.
    stages: int
    # Registers per thread, at most: fewer let more programs run at once. None: what the compiler wants.
    registers: int | None = None
    # Warps per program. None: as `num_warps` says.
    warps: int | None = None
    # Programs with work for each multiprocessor. None: RESIDENT or FP8_RESIDENT.
    resident: int | None = None

    def num_warps(self, rows: int, fp8: bool) -> int:
        """Returns the warps of a program.

        With four, products of more than 8 rows run asynchronously, and from Triton 3.7 on those of 8 as well.
        With an E4M3 cache none may: see attention_tiles.py.
        """
        return self.warps or (4 if rows <= MIN_ROWS and not (fp8 and TRITON_VERSION >= (3, 7)) else 2)

    def options(self, rows: int, head_dim: int, q_bytes: int, kv_bytes: int) -> dict:
        """Returns the options of the launch; `q_bytes` and `kv_bytes` are those of one number.

        Queries lie in shared memory, and what they gather passes through it.
        """
        options = launch_options(
            self.num_warps(rows, kv_bytes == 1),
            self.stages,
            stage_bytes=2 * TILE * head_dim * kv_bytes,
            held_bytes=rows * head_dim * (q_bytes + 4),
        )
        return options | ({"maxnreg": self.registers} if self.registers else {})

    def resident_programs(self, fp8: bool, processors: int) -> int:
        """Returns how many programs with work run at once on the whole GPU."""
        return (self.resident or (FP8_RESIDENT if fp8 else RESIDENT)) * processors


def default_launch(processors: int, tiles: int, max_groups: int) -> Launch:
    """Returns the launch for `tiles` of (row, query tile, kv head).

    The rows' lengths are not known here: a captured graph serves them all.
    """
    if tiles <= processors:
        return Launch(min(max_groups, LAUNCHED * processors // tiles), stages=3)
    # With three stages, more programs fit a multiprocessor.
    return Launch(1, stages=4 if tiles <= 4 * processors else 3)


def far_launch(processors: int, tiles: int, max_groups: int) -> Launch:
    """Returns the launch of `far_rows` where several programs share a row; two fit a multiprocessor."""
    return Launch(max(1, min(max_groups, LAUNCHED * processors // tiles)), stages=2, warps=4, resident=2)


def folding_far_launch(processors: int, tiles: int) -> Launch:
    """The same where one program walks its whole row, which needs more tiles in flight."""
    return Launch(1, stages=4 if tiles <= processors else 3, warps=4)


def rows_per_program(num_queries: int, padded_gqa: int, own_keys: bool = False) -> int:
    """Returns the (query, head of the group) pairs of one program's tile.

    With `own_keys`, queries share few keys, and a program takes those of each of its queries in turn: as few
    as it can have.
    """
    most = MIN_ROWS if own_keys else MAX_ROWS
    return max(padded_gqa, MIN_ROWS, min(most, next_power_of_2(num_queries * padded_gqa)))


def far_rows(num_queries: int, padded_gqa: int, max_groups: int) -> int:
    """Returns the pairs of a program that takes what the nodes of a tree share; 0: it is not taken apart.

    It is where rows may be long, if there are more nodes than other programs take.
    """
    rows = max(padded_gqa, min(FAR_ROWS, next_power_of_2(num_queries * padded_gqa)))
    return rows if max_groups > OWN_KEYS_GROUPS and rows > MAX_ROWS else 0


@dataclass(frozen=True)
class Plan:
    """The kernels of one call: one over all keys, or two over those that a tree's nodes share and their own.

    `far` is the launch of the former of the two, with `far_rows` pairs a program.
    """

    rows: int
    launch: Launch
    far_rows: int = 0
    far: Launch | None = None

    @property
    def shared(self) -> bool:
        """Whether several programs share a row, so that their results are combined."""
        return (self.far or self.launch).programs > 1

    def results(self, max_groups: int) -> int:
        """Returns how many partial results of a query are kept: of each group, what `far` folded, or none."""
        return padded_groups(max_groups) if self.shared else int(self.far is not None)


def plan_attention(
    num_rows: int,
    num_queries: int,
    num_heads: int,
    num_kv_heads: int,
    max_groups: int,
    processors: int,
    tree: bool = False,
    fp8: bool = False,
    launch: Launch | None = None,
) -> Plan:
    """Returns how a call is cut up; `launch`: by one program a row or by several, as it has.

    Timed on an H200 with 32 query and 8 KV heads of 128, up to 64 rows of 5 to 16 nodes and 400 to 4,300
    keys: sharing rows pays while their programs leave half the GPU free.
    """
    padded_gqa = next_power_of_2(num_heads // num_kv_heads)

    def tiles(rows: int) -> int:
        return num_rows * cdiv(num_queries, rows // padded_gqa) * num_kv_heads

    # attention_tiles.py says why not over E4M3.
    far = far_rows(num_queries, padded_gqa, max_groups) if tree and not fp8 else 0
    if far:
        own = Plan(rows_per_program(num_queries, padded_gqa, own_keys=True), Launch(1, stages=3))
        if launch.programs > 1 if launch else 2 * tiles(far) <= processors:
            return replace(own, far_rows=far, far=far_launch(processors, tiles(far), max_groups))
        far = max(padded_gqa, min(far, FOLDED_FAR_ROWS))
        return replace(own, far_rows=far, far=folding_far_launch(processors, tiles(far)))
    rows = rows_per_program(num_queries, padded_gqa, own_keys=tree and max_groups <= OWN_KEYS_GROUPS)
    return Plan(rows, launch or default_launch(processors, tiles(rows), max_groups))


def padded_groups(max_groups: int) -> int:
    """Returns the groups that partial results have memory for: whole batches of the combining kernel."""
    return cdiv(max_groups, COMBINE_BATCH) * COMBINE_BATCH


def partial_bytes(
    rows: int,
    queries: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    table_tokens: int,
    processors: int,
    trees: bool,
) -> int:
    """Returns the bytes of the partial results; `table_tokens` is what the block tables can address."""
    max_groups = cdiv(table_tokens, GROUP)
    plan = plan_attention(rows, queries, heads, kv_heads, max_groups, processors, tree=trees and queries > 1)
    return rows * queries * heads * plan.results(max_groups) * (head_dim + 2) * 4
