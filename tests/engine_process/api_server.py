"""The API server's end of an engine process's socket."""

from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine_client.messages import Outputs, decode_to_server
from quire.ipc import FrameSplitter, encode

WAIT_S = 60.0


class ApiServer:
    """Sends and receives; each wait ends after WAIT_S."""

    def __init__(self, sock):
        sock.settimeout(WAIT_S)
        self.sock = sock
        self.splitter = FrameSplitter()
        self.inbox = []

    def send(self, *items):
        self.sock.sendall(b"".join(encode(item) for item in items))

    def receive(self):
        """The next message; None at the end of the stream."""
        while not self.inbox:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self.inbox += [decode_to_server(body) for body in self.splitter.feed(data)]
        return self.inbox.pop(0)

    def receive_all(self):
        found = []
        while (message := self.receive()) is not None:
            found.append(message)
        return found


def request(request_id, *prompt, max_tokens=3, n=1):
    return Request(request_id, list(prompt or [10]), DecodingParams(max_tokens=max_tokens), n=n)


def tokens_of(received, request_id, branch=0):
    return [
        token
        for message in received
        if isinstance(message, Outputs)
        for output in message.outputs
        if (output.request_id, output.branch_index) == (request_id, branch)
        for token in output.token_ids
    ]
