"""Certificates that let devices and coordinators connect to the broker, and their revocation.

    authority.py   the CA of one deployment: issues pairs of certificates, revokes them
    index.py       the record of issued certificates, on disk
    bundles.py     a participant's files: its keys, and a configuration that uses them
    mosquitto.py   the broker's files: its certificate, the access rules, the revocation list
    commands.py    the command line

    TesseraError
    └── CoordinatorError
        └── IdentityError    a request that cannot be met; says what to do

Each participant has two connections, `<name>` and `<name>-bulk`, and a certificate for each: a
broker that binds client ids to certificates lets each certificate connect once. Private keys of
participants are in their bundle and nowhere else; the authority keeps only its own.
"""
