"""Where objects come from. An adapter for each kind of source; only `wiring` opens one."""
