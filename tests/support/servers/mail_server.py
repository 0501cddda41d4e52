"""A mail server for tests: takes what it is sent and keeps it."""

import socketserver
from email import message_from_bytes, policy
from email.message import EmailMessage


class _Session(socketserver.StreamRequestHandler):
    """One connection, as far as smtplib speaks SMTP."""

    def handle(self) -> None:
        self._say("220 ready")
        for line in self.rfile:
            command = line[:4].upper().strip()
            if command == b"DATA":
                self._say("354 go on")
                lines = iter(self.rfile.readline, b".\r\n")
                self.server.mails.append(message_from_bytes(b"".join(lines), policy=policy.default))
            self._say("221 bye" if command == b"QUIT" else "250 ok")
            if command == b"QUIT":
                return

    def _say(self, answer: str) -> None:
        self.wfile.write(f"{answer}\r\n".encode())


class MailServer(socketserver.ThreadingTCPServer):
    """Listens on a free port of this machine; ``mails`` are those that came, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.mails: list[EmailMessage] = []

    @property
    def port(self) -> int:
        return self.server_address[1]
