"""How every command speaks: tables and JSON on standard output, progress and notes on standard error."""
