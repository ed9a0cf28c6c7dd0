"""Where a store's files may lie beside a directory: an object store, or memory. The contract is store/fs.py."""
