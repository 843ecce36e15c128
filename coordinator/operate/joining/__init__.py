"""Joining, on the coordinator: codes, and the small HTTPS server that devices join through.

codes.py      the code book: codes on disk, who used them, and what a request with one gets
desk.py       what a device that joins gets: certificates or a password, and the broker
server.py     HTTPS in a thread: bounded, rate-limited
opening.py    everything together, for `serve`
commands.py   `tessera-coordinator codes`
"""
