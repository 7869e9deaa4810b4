"""An engine rank of its own process, as far as memory goes: does what JSON lines on stdin say.

    test --[verb, arguments]--> this --[answer | {"error": class}]--> test

`python -m tests.fast.elastic.memory_engine SOCKET`
"""

import json
import sys

import xxhash

from sgl_elastic.errors import ElasticError
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.mapping import RegionMapping
from tests.fast.elastic.memory_workers import SHAPE, count_fds, pattern, region_of, slot_view


def verbs_of(mapping, client):
    def write(name, slot, seed):
        slot_view(mapping, name, slot)[:] = pattern((seed, name, slot), region_of(name).slot_bytes)

    def read(name, slot):
        return xxhash.xxh3_64_hexdigest(slot_view(mapping, name, slot).tobytes())

    def is_zero(name):
        num_slots = region_of(name).num_slots
        return not any(slot_view(mapping, name, slot).any() for slot in range(num_slots))

    def addresses():
        return [mapping.range_of(region.name).address for region in SHAPE.regions]

    return {
        "park": lambda: mapping.park(client),
        "attach": lambda slots: mapping.attach(client, slots),
        "extend": lambda slots: mapping.extend(client, slots),
        "shrink": mapping.shrink,
        "detach": mapping.detach,
        "attached": mapping.attached,
        "mark_loaded": client.mark_loaded,
        "write": write,
        "read": read,
        "is_zero": is_zero,
        "addresses": addresses,
        "fds": count_fds,
    }


def main():
    client = DeviceClient(sys.argv[1], 10.0)
    verbs = verbs_of(RegionMapping(SHAPE, client.info.backend), client)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        try:
            answer = verbs[verb](*arguments)
        except ElasticError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
