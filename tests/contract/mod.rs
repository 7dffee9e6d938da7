//! rangecache's contract with its clients: responses are etcd's own, through every kind of call, for every caller; the
//! command line and the documentation say what the program does.

mod bad_input;
mod cli;
mod docs;
mod gateway;
mod gateway_clients;
mod gateway_watch;
mod identities;
mod members;
mod oracle;
mod other_etcds;
mod pages;
mod streams;
mod transparent;
mod watch_clients;
mod watch_compactions;
mod watch_handovers;
mod watch_rights;
mod watch_streams;
mod watches;
