#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Replay image requests over 1, 10 and 100 servers: what each tier of the encoder cache finds, moves and saves.

    python scripts/simulate_fleet.py                                  # the table of docs/fleet.md
    python scripts/simulate_fleet.py --encode-ms 120 --image-mib 32   # your model

Each request has one image, drawn from a Zipf distribution, and goes to a random server. A server first looks into
vLLM's own encoder cache, then into its local tier, then into the shared one; an image found in none is encoded and
stored in both. All tiers evict what was used least recently. Not modelled: prefix caching, queues, failures, restarts.

Take the times from your machine: ``bench_ec.py`` prints put (store) and get (load) of a tier; the encode time is what a
request with a new image takes longer than one with a known image (``bench_ec_vllm.py``).
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

GIB = 1024.0  # MiB


@dataclass(frozen=True)
class Layout:
    """Room for images: in vLLM's own cache and the local tier of each server, and in the tier that all share."""

    name: str
    own: int
    local: int
    shared: int


@dataclass
class Counts:
    """What became of all requests. ``encoded`` is also the number of images stored."""

    own: int = 0
    local: int = 0
    shared: int = 0
    encoded: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per lookup of the encoder cache; vLLM's own cache is asked before and not counted."""
        lookups = self.local + self.shared + self.encoded
        return (self.local + self.shared) / lookups if lookups else 0.0


class Lru:
    """Image numbers, at most ``room`` of them; the least recently used one goes first."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: OrderedDict[int, None] = OrderedDict()

    def use(self, image: int) -> bool:
        """Whether the image is held; a held one becomes the most recently used."""
        if image not in self._held:
            return False
        self._held.move_to_end(image)
        return True

    def add(self, image: int) -> None:
        """Hold the image."""
        if self._room:
            self._held[image] = None
            self._held.move_to_end(image)
            if len(self._held) > self._room:
                self._held.popitem(last=False)


def trace(requests: int, servers: int, images: int, exponent: float, seed: int) -> list[tuple[int, int]]:
    """(server, image) of each request; the same for the same arguments."""
    draw = random.Random(seed)
    weights = list(accumulate(1 / rank**exponent for rank in range(1, images + 1)))
    chosen = draw.choices(range(images), cum_weights=weights, k=requests)
    return [(draw.randrange(servers), image) for image in chosen]


def replay(requests: Iterable[tuple[int, int]], servers: int, layout: Layout) -> Counts:
    """What each request of a :func:`trace` finds."""
    own, local = ([Lru(room) for _ in range(servers)] for room in (layout.own, layout.local))
    shared = Lru(layout.shared)
    counts = Counts()
    for server, image in requests:
        if own[server].use(image):
            counts.own += 1
            continue
        own[server].add(image)
        if local[server].use(image):
            counts.local += 1
            continue
        local[server].add(image)
        if shared.use(image):
            counts.shared += 1
            continue
        shared.add(image)
        counts.encoded += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="1,10,100", help="numbers of servers, default %(default)s")
    parser.add_argument("--requests", type=int, default=3000, help="per server, default %(default)s")
    parser.add_argument("--images", type=int, default=20000, help="different images, default %(default)s")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of their popularity, default %(default)s")
    parser.add_argument("--image-mib", type=float, default=8.0, help="one encoder output, default %(default)s")
    parser.add_argument("--own-images", type=int, default=8, help="in vLLM's own cache, default %(default)s")
    parser.add_argument("--memory-gib", type=float, default=1.0, help="CPU tier of a server, default %(default)s")
    parser.add_argument("--disk-gib", type=float, default=64.0, help="disk of a server, default %(default)s")
    parser.add_argument("--shared-gib", type=float, default=256.0, help="redis or valkey, default %(default)s")
    parser.add_argument("--encode-ms", type=float, default=40.0, help="default %(default)s")
    parser.add_argument("--local-ms", type=float, default=7.0, help="load from memory or disk, default %(default)s")
    parser.add_argument("--shared-ms", type=float, default=18.0, help="load from the server, default %(default)s")
    parser.add_argument("--store-ms", type=float, default=1.2, help="a store's time in a step, default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    memory, disk, shared = (
        int(x * GIB / given.image_mib) for x in (given.memory_gib, given.disk_gib, given.shared_gib)
    )
    layouts = [
        Layout("memory", given.own_images, memory, 0),
        Layout("own disk", given.own_images, disk, 0),
        Layout("memory, redis", given.own_images, memory, shared),
    ]
    saved = (given.encode_ms - given.local_ms) / 1000, (given.encode_ms - given.shared_ms) / 1000
    print("servers  tiers           own  local  shared  encoded  hit rate  GiB: read  network  saved s: local  shared")
    for servers in map(int, given.servers.split(",")):
        requests = trace(given.requests * servers, servers, given.images, given.zipf, given.seed)
        for layout in layouts:
            counts = replay(requests, servers, layout)
            moved = [n * given.image_mib / GIB for n in (counts.local, counts.shared + counts.encoded)]
            print(
                f"{servers:7}  {layout.name:13}{counts.own:6}{counts.local:7}{counts.shared:8}{counts.encoded:9}"
                f"{counts.hit_rate:9.0%}{moved[0]:12.1f}{moved[1] if layout.shared else 0:9.1f}"
                f"{counts.local * saved[0]:16.1f}{counts.shared * saved[1]:8.1f}"
            )
    for name, seconds in zip(("local", "shared"), saved, strict=True):
        pays = given.store_ms / 1000 / (seconds + given.store_ms / 1000)
        print(f"A {name} tier pays from a hit rate of {pays:.0%}." if seconds > 0 else f"A {name} tier never pays.")


if __name__ == "__main__":
    main()
