"""What several test files use: servers, fixtures, command lines and made-up data; no tests.

What every implementation of an interface must do is `contracts`; a Jackal network is `loopback`;
what breaks things on purpose, and looks at them afterwards, is `faults`.
"""
