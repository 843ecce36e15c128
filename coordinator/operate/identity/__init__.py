"""Who may connect to the broker: certificates for devices and coordinators, and their end.

    authority.py   the CA of one deployment: issues pairs of certificates, revokes them
    index.py       what was issued, on disk
    bundles.py     what a participant gets: its keys, and a configuration that uses them
    mosquitto.py   what the broker gets: its certificate, the access rules, the revocation list
    commands.py    the command line

    TesseraError
    └── CoordinatorError
        └── IdentityError    something asked for that cannot be had; says what to do

Each participant has two connections, `<name>` and `<name>-bulk`, and a certificate for each: a
broker that binds client ids to certificates lets each certificate connect once. Private keys of
participants are in their bundle and nowhere else; only the authority's own stays with it.
"""
