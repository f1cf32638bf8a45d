//! The command line described for shells and for `man`, made from the same definitions that parse it.

use crate::Error;
use crate::cli::Cli;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use std::path::Path;

/// A script that completes commands, flags and file names.
pub(crate) fn completions(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "shardmill", &mut script);
    script
}

/// Writes `shardmill.1` and a page for each command to `dir`, and counts them.
///
/// # Errors
/// [`Error::Io`] naming the directory.
pub(crate) fn man_pages(dir: &Path) -> Result<usize, Error> {
    let io = |action: &'static str| move |e| Error::io(dir, action, e);
    std::fs::create_dir_all(dir).map_err(io("cannot create the directory"))?;
    // The page of `help` would say nothing that the others do not.
    let mut command = Cli::command().disable_help_subcommand(true);
    // Gives the pages of the commands the program's name.
    command.build();
    let pages: Vec<Command> = std::iter::once(&command).chain(command.get_subcommands()).cloned().collect();
    let count = pages.len();
    for page in pages {
        let footer = format!("shardmill {}", env!("CARGO_PKG_VERSION"));
        Man::new(page).source(footer).generate_to(dir).map_err(io("cannot write the manual pages"))?;
    }
    Ok(count)
}
