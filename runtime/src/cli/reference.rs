//! `shardrun completions` and `shardrun man`: the command line described by the definitions that parse it.

use super::{Cli, Error, print};
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use std::path::PathBuf;
use std::process::ExitCode;

/// Prints completions for a shell
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shardrun completions bash > /etc/bash_completion.d/shardrun
  shardrun completions fish > ~/.config/fish/completions/shardrun.fish")]
pub(super) struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    pub(super) fn run(self) -> Result<ExitCode, Error> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "shardrun", &mut script);
        print(&String::from_utf8_lossy(&script))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Writes the manual pages, one for each command, to a folder
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shardrun man /usr/local/share/man/man1")]
pub(super) struct Man {
    /// The folder; made if it is not there. Pages of the same names are replaced
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

impl Man {
    pub(super) fn run(self) -> Result<ExitCode, Error> {
        let dir = self.dir.display();
        std::fs::create_dir_all(&self.dir).map_err(Error::io(format!("{dir}: cannot create the folder")))?;
        // The page of `help` would say nothing that the others do not.
        let command = Cli::command().disable_help_subcommand(true);
        let count = 1 + command.get_subcommands().count();
        clap_mangen::generate_to(command, &self.dir)
            .map_err(Error::io(format!("{dir}: cannot write the manual pages")))?;
        print(&format!("{dir}: {count} pages; read them with `man -l {dir}/shardrun.1`\n"))?;
        Ok(ExitCode::SUCCESS)
    }
}
