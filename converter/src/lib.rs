//! shardmill as a library.
