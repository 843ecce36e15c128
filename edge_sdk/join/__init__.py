"""Joining: one code, pasted on a device, gets it everything that it needs to take part.

code.py       the code: address, fingerprint of the authority, task, secret
keys.py       the device's key, and the request for its certificates
client.py     the two HTTPS requests to the coordinator
joining.py    the files of a device that has joined, and the order in which they are made
commands.py   the command line

TesseraError
└── JoinError    a code that cannot be used, or a coordinator that refuses it; says what to do
"""
