"""Encrypts and decrypts the chunks of private sources. `formats.age` has the file format."""
