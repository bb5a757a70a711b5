"""Mistakes of kernels in which the blocks of a cluster share the columns of a tile, one each."""

from __future__ import annotations

from tests.helpers.streamed_graphs import Hand

#: Kernels to change. In all but one, clusters walk equally many tiles, so results of wrong tiles
#: are stored within the output.
SHARE_KERNELS = {
    # two of four warps compute a row of x, and the others another one
    "shares, 4 rows": Hand(
        rows=(64,),
        columns=1024,
        group=128,
        dtype="float32",
        has_norm=True,
        has_gate=True,
        scales_first=False,
        tile=2,
        stages=3,
        warps=4,
        blocks=5,
        batch=4,
        has_zeros=True,
        sharers=2,
    ),
    # a team of one warp multiplies all columns of a share
    "shares, teams": Hand(
        rows=(192,),
        columns=512,
        group=128,
        dtype="float32",
        has_residual=True,
        is_turned=True,
        tile=1,
        stages=4,
        warps=2,
        blocks=9,
        sharers=4,
    ),
    "shares of columns": Hand(
        rows=(128,),
        columns=768,
        group=64,
        dtype="float32",
        tile=2,
        stages=3,
        blocks=4,
        has_columns=True,
        scale_columns=(0,),
        has_zeros=True,
        sharers=2,
    ),
    "shares of rows in words": Hand(
        rows=(128,),
        columns=512,
        group=64,
        dtype="float32",
        has_norm=True,
        tile=2,
        stages=3,
        warps=4,
        blocks=4,
        has_rows_in_words=True,
        scale_columns=(0,),
        tile_rows=32,
        has_zeros=True,
        zeros_in_words=True,
        sharers=2,
    ),
    "shares of lanes": Hand(
        rows=(48, 48),
        columns=1024,
        group=128,
        dtype="float32",
        tile=2,
        stages=3,
        blocks=4,
        scale_columns=(0,),
        shifts="codes",
        shift_columns=(),
        has_lanes=True,
        padding=128,
        scale_gaps=True,
        sharers=2,
    ),
    # a thread stores several results, and one cluster has fewer tiles than the other
    "shares, many tiles": Hand(
        rows=(272,),
        columns=1024,
        group=128,
        dtype="float32",
        has_norm=True,
        has_residual=True,
        tile=4,
        stages=2,
        warps=2,
        blocks=4,
        batch=8,
        sharers=2,
    ),
    # scales lie row after row, and a share is no multiple of a span
    "shares, spans": Hand(
        rows=(64,),
        columns=2560,
        group=256,
        dtype="float32",
        has_norm=True,
        scales_first=False,
        tile=1,
        blocks=4,
        sharers=2,
    ),
}

SYNC = "cluster.sync();  // the warps that compute, of all blocks that share columns"
LAST_SYNC = "cluster.sync();  // no block ends while another one reads its memory"
RANKS = "int rank = 0; rank < sharers; ++rank) "
CLUSTERS = "const int walker = int(blockIdx.x) / sharers, share = int(blockIdx.x) % sharers;"
MINE = "(tiles - walker + walkers - 1) / walkers"
COPIED_TILE = "row_0 = (walker + i * walkers)"
STORED_TILE = "row = (walker + own_tile * walkers)"

#: Mistakes of any kernel: what they are, what is there once, and what is there instead.
COMMON = [
    ("sums of other blocks are read too early", SYNC, ""),
    ("a block ends while others read its sums", LAST_SYNC, ""),
    ("all blocks meet only at the end", SYNC, "meet<2>(threads);"),
    ("sums of the first block only", RANKS, "int rank = 0; rank < 1; ++rank) "),
    ("sums of all blocks but the first", RANKS, "int rank = 1; rank < sharers; ++rank) "),
    ("sums of all blocks but the last", RANKS, "int rank = 0; rank + 1 < sharers; ++rank) "),
    ("sums of the own block, several times", ", rank);", ", share);"),
    ("sums of the first block, several times", ", rank);", ", 0);"),
    ("clusters walk as many tiles as there are blocks", "walkers = 2;", "walkers = blocks;"),
    ("blocks walk tiles on their own", "walker = int(blockIdx.x) / sharers", "walker = blockIdx.x"),
    ("all clusters walk the same tiles", "walker = int(blockIdx.x) / sharers", "walker = 0"),
    ("all blocks have the first share", "share = int(blockIdx.x) % sharers", "share = 0"),
    ("too few tiles for the first cluster", MINE, "(tiles - walker) / walkers"),
    ("copies of the tiles of another cluster", COPIED_TILE, "row_0 = (1 - walker + i * walkers)"),
    ("copies of the same tile", COPIED_TILE, "row_0 = walker"),
]

#: Mistakes of kernels with two blocks in each of two clusters.
OF_TWO = [
    (
        "blocks of a cluster are far apart",
        CLUSTERS,
        "const int walker = int(blockIdx.x) % walkers, share = int(blockIdx.x) / walkers;",
    ),
    ("results of the tiles of other shares", STORED_TILE, "row = (share + own_tile * walkers)"),
    ("copies of the tiles of other shares", COPIED_TILE, "row_0 = (share + i * walkers)"),
    ("rows of the first share are stored twice", "of_tile = share * ", "of_tile = 0 * "),
    ("a share is half of the rows that are stored", "of_tile = share * ", "of_tile = share / 2 * "),
]

CODES = " + share * 256, chunk_bytes"
SECOND_CODES = "codes1_ptr + row * row_bytes + c * chunk_bytes + share * 256"
SCALE = "(shared.scales_0[i % 3])[g * 8 + (share * 512 + unit * 128) / 128]"
ZERO = "(shared.zeros_1[i % 3])[g * 8 + (share * 512 + unit * 128) / 128]"
X_ROW = "(b_0 + m * row_teams + row_team) * 1024LL"
OWN_ROW = "const int b = b_0 + m * row_teams + row_team;"
OWN_PARTS = "own += shared.partial[e / 64][w][e % 64];"
OWN_SQUARES = "own += shared.sums[e][w];"

#: Mistakes of a kernel with a norm, zero points and teams of warps that compute rows of x.
OF_ROW_TEAMS = [
    ("codes of the first share", CODES, ", chunk_bytes"),
    ("codes of shares that overlap", CODES, " + share * 128, chunk_bytes"),
    ("codes of the second product's first share", SECOND_CODES, SECOND_CODES[:-14]),
    ("scales of the first share", SCALE, SCALE.replace("share * 512 + ", "")),
    ("scales of shares in groups", SCALE, SCALE.replace("share * 512", "share * 4")),
    ("zero points of the first share", ZERO, ZERO.replace("share * 512 + ", "")),
    ("x of the first share", "x_ptr + share * 512", "x_ptr"),
    ("gamma of the first share", "gamma_ptr + share * 512", "gamma_ptr"),
    ("rows of x as long as a share", X_ROW, X_ROW.replace("1024LL", "512LL")),
    (
        "squares of the first block only",
        f"{RANKS}squares",
        RANKS.replace("sharers", "1") + "squares",
    ),
    ("squares of the own block", "[0 * batch + b][0], rank)", "[0 * batch + b][0], share)"),
    ("squares of the first row", "&shared.sums[0 * batch + b]", "&shared.sums[0 * batch]"),
    ("squares of a share are the mean of all", "* 0.0009765625f", "* 0.001953125f"),
    ("both teams compute the first rows", "row_team = warp / row_warps", "row_team = 0"),
    (
        "a warp of each team computes its columns twice",
        "row_warp = warp % row_warps",
        "row_warp = 0",
    ),
    ("columns of the whole block", "row_tid = tid % row_threads", "row_tid = tid % 32"),
    ("teams load the rows of others", X_ROW, X_ROW.replace("+ row_team", "+ (1 - row_team)")),
    ("teams load neighbouring rows", X_ROW, "(b_0 + m + 2 * row_team) * 1024LL"),
    ("teams store neighbouring rows", OWN_ROW, "const int b = b_0 + m + 2 * row_team;"),
    ("a team computes one row", OWN_ROW, "const int b = b_0 + row_team;"),
    ("squares of two warps in one place", "[0 * batch + b][row_warp]", "[0 * batch + b][0]"),
    ("sums of one warp", OWN_PARTS, OWN_PARTS.replace("[w]", "[0]")),
    ("sums of fewer warps", f"w < warps; ++w) {OWN_PARTS}", f"w < 1; ++w) {OWN_PARTS}"),
    ("sums of half of the elements", "e < mine * 64", "e < mine * 32"),
    ("sums of another tile", OWN_PARTS, OWN_PARTS.replace("[e / 64]", "[0]")),
    ("sums of the warps are left where they are", "shared.partial[e / 64][0][e % 64] = own;", ""),
    ("squares of one warp", OWN_SQUARES, OWN_SQUARES.replace("[w]", "[0]")),
    ("squares of the first row are added up", "e < 1 * batch", "e < 1"),
    ("squares of the warps are left where they are", "shared.sums[e][0] = own;", ""),
    ("sums of the warps are added up too early", "meet<2>(threads);", ""),
    ("rows of x from the thread", "const int b = of_tile / 8;", "const int b = tid / 8 % batch;"),
    ("rows of codes of one share", "own_row = of_tile % 8", "own_row = of_tile % 4"),
    ("half of the results", "tid < mine * 16;", "tid < mine * 8;"),
    ("tiles of the results of whole blocks", "own_tile = tid / 16", "own_tile = tid / 32"),
    (
        "sums of the first product",
        "&shared.partial[own_tile][0][(own_row + 8) * batch + b]",
        "&shared.partial[own_tile][0][own_row * batch + b]",
    ),
]

#: Mistakes of a kernel with four blocks in each cluster, and teams of one warp.
OF_TEAMS = [
    ("sums of two of four blocks", RANKS, "int rank = 0; rank < 2; ++rank) "),
    ("sums of every second block", RANKS, "int rank = 0; rank < sharers; rank += 2) "),
    ("shares of two blocks", "share = int(blockIdx.x) % sharers", "share = int(blockIdx.x) % 2"),
    ("codes of the first share", " + share * 64, chunk_bytes", ", chunk_bytes"),
    ("scales of the first share", "(share * 128 + unit * 128)", "(unit * 128)"),
    ("x of the first share", "x_ptr + share * 128", "x_ptr"),
    ("both teams multiply", "if (n % 2 != team) {", "if (false) {"),
    ("a team arrives for both", "&shared.empty[s], 32 * team_warps", "&shared.empty[s], threads"),
    ("rows of one share", "of_tile = share * 4", "of_tile = share % 2 * 4"),
]

#: Mistakes of a kernel whose threads store several results each.
OF_MANY_TILES = [
    ("results of the first threads", "e < mine * 64", "e < threads"),
    ("results of every second round", "e < mine * 64; e += threads", "e < mine * 64; e += 128"),
    ("tiles of whole blocks", "own_tile = e / 64", "own_tile = e / 128"),
    ("rows of the first share", "of_tile = share * 64 + e % 64", "of_tile = e % 64"),
    ("residuals of the first row", "*residual_at(at_m, at_n)", "*residual_at(0, at_n)"),
    ("sums of the first tile", "&shared.partial[own_tile][0]", "&shared.partial[0][0]"),
    ("sums of the first row", "[own_row * batch + b]", "[own_row * batch]"),
]

GROUP = "(c * 2 + group + share * 6) * 128"
ROW_GROUP = "(c * 2 + group + share * 4) * 128"
LANE_GROUP = "(c * 2 + group + share * 4) * (row_0 < 48"

#: Mistakes of one kernel whose codes, scales or other factor lie in another way.
OF_ONE_ORDER = {
    "shares of columns": [
        ("words of the first share", "(chunk_bytes / 4) + share * 48", "(chunk_bytes / 4)"),
        ("codes for words", "(chunk_bytes / 4) + share * 48", "(chunk_bytes / 4) + share * 24"),
        ("scales of the first share", f"+ {GROUP}, 128, ", "+ (c * 2 + group) * 128, 128, "),
        ("scales of the next group", GROUP, GROUP.replace("share * 6", "share")),
        (
            "zero points of the first share",
            f"zeros0_ptr + row_0 + {GROUP}",
            "zeros0_ptr + row_0 + (c * 2 + group) * 128",
        ),
        ("x of the first share", "x_ptr + share * 384", "x_ptr"),
    ],
    "shares of rows in words": [
        ("words of the first share", "(c * 128 + share * 256 + ", "(c * 128 + "),
        ("words of shares that overlap", "(c * 128 + share * 256 + ", "(c * 128 + share * 128 + "),
        (
            "scales of the first share",
            f"scales0_ptr + row_0 + {ROW_GROUP}",
            "scales0_ptr + row_0 + (c * 2 + group) * 128",
        ),
        ("zero points of the first share", f"{ROW_GROUP} / 2", "(c * 2 + group) * 128 / 2"),
        ("squares of one block", f"{RANKS}squares", RANKS.replace("sharers", "1") + "squares"),
        ("squares of one warp", OWN_SQUARES, OWN_SQUARES.replace("[w]", "[0]")),
    ],
    "shares of lanes": [
        ("words of the first share", " * 8 + share * 2048, ", " * 8, "),
        ("words of one row", " * 8 + share * 2048, ", " * 8 + share * 256, "),
        ("scales of the first share", LANE_GROUP, LANE_GROUP.replace(" + share * 4", "")),
        ("shifts of the first share", "(share * 512 + unit * 128)", "(unit * 128)"),
        ("columns of the first share", "x_ptr + share * 512", "x_ptr"),
        (
            "first bytes of another tile",
            "    const int row_0 = (walker",
            "    const int row_0 = (share",
        ),
    ],
    "shares, spans": [
        ("x of the first share", "x_ptr + share * 1280", "x_ptr"),
        ("gamma of the first share", "gamma_ptr + share * 1280", "gamma_ptr"),
        (
            "spans as long as shares",
            "gamma_ptr + share * 1280 + span * 512",
            "gamma_ptr + span * 1280",
        ),
        ("codes of the first share", " + share * 640, chunk_bytes", ", chunk_bytes"),
        ("scales of the first share", "share * 1280 + unit * 128", "unit * 128"),
        ("scales of the first span", "span * 512 + share", "share"),
    ],
}

#: Mistakes by kernel: what they are, what is there once, and what is there instead.
OF_SHARES = {
    "shares, 4 rows": [*COMMON, *OF_TWO, *OF_ROW_TEAMS],
    "shares, teams": [*COMMON, *OF_TEAMS],
    "shares, many tiles": [*COMMON[:8], *OF_MANY_TILES],
    **{name: [*COMMON[:4], *OF_TWO[:2], *own] for name, own in OF_ONE_ORDER.items()},
}
