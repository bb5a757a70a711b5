"""Attention of a decoding step in its breadth: each feature in one searched and proven kernel; random configurations beside SDPA."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import attention_configs as configs

RANDOM, KINDS = 100, (0, 2, 3, 5, 6, 7, 10, 12)
"""Random configurations, and what they are of."""


INTERPRETED = """
import json, random, time
import attention_configs as configs, test_attention
from tolerances import as_close_as
from mirage_hf.codegen import compile as compiler, triton

wrong, spent = [], {}
for seed in range(test_attention.RANDOM):
    draw = random.Random(seed)
    number = test_attention.KINDS[seed % len(test_attention.KINDS)]
    k, slots = configs.kind(number, configs.SMALL), draw.choice(configs.SMALL["slots"])
    t0 = time.time()
    u, schedules = configs.chosen(k, slots, draw, 32, 16, blocks=16)
    t1 = time.time()
    g, program = u.program, triton.generate(u, schedules)
    inputs = configs.inputs_of(k, g, draw)
    stock, exact = configs.both(k, g, inputs)
    after = configs.copied(inputs)
    t2 = time.time()
    got = compiler.load(program.source, program.digest).run(after)
    t3 = time.time()
    spent[seed] = (number, round(t1 - t0, 2), round(t2 - t1, 2), round(t3 - t2, 2))
    what = f"seed {seed} kind {number} ({k}) slots {slots} {[*map(str, schedules)]}"
    try:
        as_close_as(got, stock, exact, what)
        assert configs.untouched(k, g, inputs, after), f"{what}: a slot that is not appended to has changed"
    except AssertionError as e:
        wrong.append(str(e))
import sys
print(spent, file=sys.stderr)
print(json.dumps(wrong))
"""


def test_random_configurations_are_as_close_to_float64_as_sdpa(tmp_path):
    kinds = [configs.kind(n, configs.SMALL) for n in KINDS]
    for name, wanted in (("norm", configs.NORMS), ("rope", configs.ROPES), ("bias", (False, True)), ("sinks", (False, True)),
                         ("mask", (False, True)), ("window", (False, True)), ("queries", (1, 2, 3)), ("head_dim", (64, 80))):
        assert {k[name] for k in kinds} == set(wanted), f"{name}: {[k[name] for k in kinds]}"
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "MIRAGE_HF_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert not wrong, "\n".join(wrong[:8])
