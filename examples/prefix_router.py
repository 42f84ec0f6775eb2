"""Routes prompts to the engine that has most of their prefix, by its events: `python examples/prefix_router.py`."""

import msgspec
import zmq

from blockyard import BlockManager, PrefixCaching
from blockyard.events import export_keys
from blockyard.integrations.router_events import BlockRemoved, BlockStored, EventPublisher, Message

BLOCK_SIZE = 4


class Router:
    """Knows which blocks each engine has, and in which media: a block that is on the host alone still counts."""

    def __init__(self, endpoints):
        self.blocks = [{} for _ in endpoints]  # of each engine: media by key
        self.numbers = [0] * len(endpoints)
        self.sockets = [zmq.Context.instance().socket(zmq.SUB) for _ in endpoints]
        self.decoder = msgspec.msgpack.Decoder(Message)
        for socket, endpoint in zip(self.sockets, endpoints, strict=True):
            socket.connect(endpoint)
            socket.subscribe("")

    def follow(self, timeout=1000):
        """Take in what the engines say, until they are silent for `timeout` milliseconds."""
        for engine, socket in enumerate(self.sockets):
            while socket.poll(timeout):
                _, number, payload = socket.recv_multipart()
                if int.from_bytes(number, "big") != self.numbers[engine]:
                    self.blocks[engine].clear()  # messages were lost: better no hit than a wrong one
                self.numbers[engine] = int.from_bytes(number, "big") + 1
                for event in self.decoder.decode(payload).events:
                    self.apply(self.blocks[engine], event)

    def apply(self, blocks, event):
        """Change what is known of one engine."""
        if not isinstance(event, BlockStored | BlockRemoved):
            blocks.clear()
            return
        for key in event.block_hashes:
            media = blocks.setdefault(key, set())
            (media.add if isinstance(event, BlockStored) else media.discard)(event.medium)

    def route(self, prompt, salt=None):
        """Return the engine with the longest prefix of a prompt, and the tokens that it has."""
        keys = export_keys(prompt, block_size=BLOCK_SIZE, salt=salt)
        hits = [next((n for n, key in enumerate(keys) if not blocks.get(key)), len(keys)) for blocks in self.blocks]
        return max(range(len(hits)), key=hits.__getitem__), max(hits) * BLOCK_SIZE


endpoints = ["inproc://engine-0", "inproc://engine-1"]
publishers = [EventPublisher(endpoint, block_size=BLOCK_SIZE) for endpoint in endpoints]
router = Router(endpoints)
for engine, publisher in enumerate(publishers):
    manager = BlockManager(block_size=BLOCK_SIZE, device_blocks=64, prefix_caching=PrefixCaching(max_events=1000))
    prompt = list(range(100 * engine, 100 * engine + 24))
    sequence = manager.allocate(prompt)
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed(sequence)
    publisher.know(prompt)
    publisher.publish(manager.prefix.take_events())
router.follow()
print("engine {} has {} tokens of the prompt".format(*router.route([*range(100, 124), 7, 8, 9, 10])))
