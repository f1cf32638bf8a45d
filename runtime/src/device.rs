//! What a checkpoint runs on.

use crate::Error;
use kernels::cuda::driver::Device as Gpu;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// What a checkpoint runs on, and how it gets there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Processor or GPUs.
    pub device: Device,
    /// GPUs that ranks share (`--devices`): they are dealt out in turn.
    pub shared: Vec<usize>,
    /// How rank files are read.
    pub load_mode: LoadMode,
    /// How ranks on GPUs add up their sums.
    pub communicator: CommunicatorChoice,
}

/// How ranks on GPUs add up their sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CommunicatorChoice {
    /// Local when all ranks are on one GPU, peer when all reach each other's memory, nccl otherwise.
    #[default]
    Auto,
    /// Ranks on one GPU, in the order that the host gives.
    Local,
    /// GPUs that write into each other's memory.
    Peer,
    /// NVIDIA's library, for GPUs that cannot.
    Nccl,
}

impl FromStr for CommunicatorChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "local" => Ok(Self::Local),
            "peer" => Ok(Self::Peer),
            "nccl" => Ok(Self::Nccl),
            _ => Err("expected auto, local, peer or nccl".to_owned()),
        }
    }
}

impl fmt::Display for CommunicatorChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Local => "local",
            Self::Peer => "peer",
            Self::Nccl => "nccl",
        })
    }
}

/// Processor or GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// GPUs, one for each rank: these, or the first ones when none is named.
    Cuda(Vec<usize>),
}

/// How a rank file gets into a GPU's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadMode {
    /// Buffered when most of it is in the page cache, direct otherwise.
    #[default]
    Auto,
    /// Through the page cache.
    Buffered,
    /// Past the page cache (O_DIRECT), where the file system can.
    Direct,
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(Vec::new())),
            Some(("cuda", list)) => ordinals(list).map(Self::Cuda),
            _ => Err("expected cpu, cuda, or cuda: and GPU numbers, e.g. cuda:0,1".to_owned()),
        }
    }
}

/// Numbers of GPUs from a list such as `0,1`.
///
/// # Errors
/// What was expected.
pub fn ordinals(list: &str) -> Result<Vec<usize>, String> {
    /// More GPUs than this are no machine.
    const MOST: usize = 1024;
    let number = |text: &str| text.trim().parse().ok().filter(|&n: &usize| n < MOST);
    let numbers: Option<Vec<usize>> = list.split(',').map(number).collect();
    numbers.ok_or_else(|| "expected numbers of GPUs, e.g. 0,1".to_owned())
}

impl FromStr for LoadMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "buffered" => Ok(Self::Buffered),
            "direct" => Ok(Self::Direct),
            _ => Err("expected auto, buffered or direct".to_owned()),
        }
    }
}

impl DeviceOptions {
    /// The GPU of each rank, opened; `None`: the processor.
    ///
    /// # Errors
    /// [`Error::Option`] when there are more ranks than GPUs, [`Error::Device`] when one cannot be used.
    pub fn open(&self, ranks: usize) -> Result<Option<Vec<Arc<Gpu>>>, Error> {
        let Device::Cuda(named) = &self.device else {
            if self.shared.is_empty() {
                return Ok(None);
            }
            let found = "--device cpu".to_owned();
            return Err(Error::Option {
                option: "--devices",
                expected: "--device cuda with it".to_owned(),
                found,
            });
        };
        let there = Gpu::count().map_err(kernels::Error::from)?;
        let numbers: Vec<usize> = if self.shared.is_empty() {
            let numbers = if named.is_empty() { (0..there).collect() } else { named.clone() };
            if numbers.len() < ranks || numbers.is_empty() {
                return Err(Error::Option {
                    option: "--device",
                    expected: format!(
                        "a GPU for each of the {ranks} ranks (or --devices with the GPUs that ranks are to share)"
                    ),
                    found: match numbers.len() {
                        0 => "no GPU".to_owned(),
                        1 => "1 GPU".to_owned(),
                        n => format!("{n} GPUs"),
                    },
                });
            }
            numbers
        } else {
            self.shared.clone()
        };
        self.check_sharing(&numbers, ranks)?;
        let mut opened: Vec<Arc<Gpu>> = Vec::new();
        for rank in 0..ranks {
            let number = numbers[rank % numbers.len()];
            let gpu = match opened.iter().find(|gpu| gpu.ordinal() == number) {
                Some(gpu) => Arc::clone(gpu),
                None => Gpu::open(number).map_err(kernels::Error::from)?,
            };
            opened.push(gpu);
        }
        Ok(Some(opened))
    }

    /// Ranks wait for each other inside kernels when they are on several GPUs, and those of one GPU would keep each other from
    /// running: so all ranks are on one, or each has its own.
    fn check_sharing(&self, numbers: &[usize], ranks: usize) -> Result<(), Error> {
        let used: Vec<usize> = (0..ranks).map(|rank| numbers[rank % numbers.len()]).collect();
        let different: BTreeSet<usize> = used.iter().copied().collect();
        let (own, communicator) = (different.len() == ranks, self.communicator);
        let alone = matches!(communicator, CommunicatorChoice::Peer | CommunicatorChoice::Nccl);
        if own || (different.len() == 1 && !alone) {
            return Ok(());
        }
        let list = used.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let gpus = different.len();
        let (option, expected) = if gpus == 1 {
            ("--communicator", format!("auto or local, as one GPU has all {ranks} ranks"))
        } else {
            let convert = format!("or a checkpoint of {gpus} ranks: `shardmill convert --ranks {gpus}`");
            ("--devices", format!("a GPU for each of the {ranks} ranks, one for all of them, {convert}"))
        };
        let found = if gpus == 1 { communicator.to_string() } else { list };
        Err(Error::Option { option, expected, found })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_one_gpu_or_none() {
        let refused = |numbers: &[usize], ranks, communicator| {
            let options = DeviceOptions { communicator, ..DeviceOptions::default() };
            options.check_sharing(numbers, ranks).err().map(|error| error.to_string())
        };
        use CommunicatorChoice::{Auto, Local, Nccl, Peer};
        assert_eq!(refused(&[0], 8, Auto), None);
        assert_eq!(refused(&[3, 3], 8, Local), None);
        assert_eq!(refused(&[1, 0, 2], 2, Nccl), None);
        assert_eq!(refused(&[5], 1, Peer), None);
        let line = refused(&[0, 1], 8, Auto).unwrap();
        assert!(line.contains("--ranks 2") && line.ends_with("found 0,1,0,1,0,1,0,1"), "{line}");
        let line = refused(&[0], 2, Peer).unwrap();
        assert!(
            line.starts_with("--communicator: expected auto or local") && line.ends_with("found peer"),
            "{line}"
        );
        assert!(refused(&[0, 1, 0], 3, Nccl).unwrap().starts_with("--devices"));
    }

    #[test]
    fn devices_are_read_or_refused() {
        assert_eq!("cpu".parse(), Ok(Device::Cpu));
        assert_eq!("cuda".parse(), Ok(Device::Cuda(vec![])));
        assert_eq!("cuda:1,0".parse(), Ok(Device::Cuda(vec![1, 0])));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:0,", "cuda:-1", "cuda:99999", "cpu:0"] {
            assert!(wrong.parse::<Device>().is_err(), "{wrong}");
        }
    }
}
