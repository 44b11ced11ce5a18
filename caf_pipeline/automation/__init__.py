"""The decisions of sensors and jobs. The definitions are in `defs`."""
