//! Reductions by multicast: each rank puts its contribution into memory of its own device, and all devices' memory is
//! reduced where one address reaches it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use cuda_abi::sys::CUdevice_attribute as A;
use cuda_abi::types::*;
use parking_lot::Mutex;

use crate::bootstrap::Bootstrap;
use crate::cuda::{self, Context, Memory, call};
use crate::kernel::{SLOT_BYTES, SLOTS};
use crate::service::{self, Service};
use crate::types::{Error, Result, warn};

/// What a peer asks the service of rank 0 for.
pub(crate) const OBJECT: u8 = 1;

/// An object that this rank is a part of. The fields are dropped in this order.
pub(crate) struct Nvls {
    team: Team,
    memory: Memory,
    _service: Option<Service>,
    number: u64,
    /// How many ranks are in this process.
    local_ranks: usize,
}

/// What ranks of this process are done with while others of it may still use it, by the number of the communicator.
static LINGERING: Mutex<BTreeMap<u64, Vec<Nvls>>> = Mutex::new(BTreeMap::new());

/// The object, mapped and bound; unbound when dropped.
struct Team {
    mapped: Option<Memory>,
    object: CUmemGenericAllocationHandle,
    device: CUdevice,
    size_bytes: usize,
    context: Context,
}

impl Drop for Team {
    fn drop(&mut self) {
        // At the end of the process the driver may be gone.
        let _ = cuda::make_current(self.context);
        let _ = call!(cuMulticastUnbind(self.object, self.device, 0, self.size_bytes));
        self.mapped = None;
    }
}

/// Slots for chunks, and a counter behind them.
const NEEDED_BYTES: usize = SLOTS * SLOT_BYTES + 64;

fn is_wanted(device: CUdevice) -> Result<bool> {
    let is_on = std::env::var("NCCL_NVLS_ENABLE").map_or(true, |text| text.trim() != "0");
    Ok(is_on && cuda::device_attribute(A::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device)? != 0)
}

impl Nvls {
    /// Joins the object of all ranks. None where a rank cannot or does not want to, or two share a device.
    pub(crate) fn connect(bootstrap: &Bootstrap, context: Context, device: CUdevice) -> Result<Option<Self>> {
        let mut mine = vec![u8::from(is_wanted(device)?)];
        mine.extend(cuda::bus_id(device)?);
        let process = std::process::id().to_le_bytes();
        let processes = bootstrap.all_gather(&process)?;
        let local_ranks = processes.iter().filter(|other| other[..] == process).count();
        let all = bootstrap.all_gather(&mine)?;
        let has_own_device = |rank: usize| !all[..rank].contains(&all[rank]);
        let is_possible = all.iter().enumerate().all(|(rank, one)| one[0] == 1 && has_own_device(rank));
        if bootstrap.ranks < 2 || !is_possible {
            return Ok(None);
        }
        let properties = CUmulticastObjectProp {
            numDevices: u32::try_from(bootstrap.ranks).map_err(|_| Error::InternalError)?,
            size: NEEDED_BYTES,
            handleTypes: 1,
            flags: 0,
        };
        let mut unit = 0;
        call!(cuMulticastGetGranularity(&raw mut unit, &raw const properties, 0))?;
        let size_bytes = NEEDED_BYTES.next_multiple_of(unit);
        let properties = CUmulticastObjectProp { size: size_bytes, ..properties };
        warn(&format!("rank {} of {}: a multicast object", bootstrap.rank, bootstrap.ranks));
        let (object, service) = object(bootstrap, context, &properties)?;
        call!(cuMulticastAddDevice(object, device))?;
        let memory = Memory::create(context, device, size_bytes, false)?;
        memory.clear()?;
        call!(cuMulticastBindMem(object, 0, memory.handle()?, 0, size_bytes, 0))?;
        let mapped = Memory::map(context, device, object, size_bytes, false)?;
        let team = Team { mapped: Some(mapped), object, device, size_bytes, context };
        bootstrap.barrier()?;
        Ok(Some(Self { team, memory, _service: service, number: bootstrap.number, local_ranks }))
    }

    /// Whether the ranks are processes of their own, which can wait for each other at the end.
    pub(crate) fn is_alone_in_process(&self) -> bool {
        self.local_ranks == 1
    }

    /// Ends it; with the last rank of this process, where there are several: a thread destroys one after the other.
    pub(crate) fn end(self) {
        if self.is_alone_in_process() {
            return;
        }
        let (number, local_ranks) = (self.number, self.local_ranks);
        let mut lingering = LINGERING.lock();
        let ended = lingering.entry(number).or_default();
        ended.push(self);
        let all = if ended.len() == local_ranks { lingering.remove(&number) } else { None };
        drop(lingering);
        drop(all);
    }

    /// Where the kernel finds the memory of all devices, and this one's.
    pub(crate) fn addresses(&self) -> [u64; 2] {
        [self.team.mapped.as_ref().map_or(0, |mapped| mapped.address), self.memory.address]
    }
}

/// Rank 0 makes the object, the others get it from its service.
fn object(
    bootstrap: &Bootstrap,
    context: Context,
    properties: &CUmulticastObjectProp,
) -> Result<(CUmemGenericAllocationHandle, Option<Service>)> {
    if bootstrap.rank > 0 {
        bootstrap.barrier()?;
        let descriptor = service::fetch(!bootstrap.number, 0, OBJECT)?;
        return Ok((cuda::import_handle(descriptor.as_fd())?, None));
    }
    let mut object = 0;
    call!(cuMulticastCreate(&raw mut object, properties))?;
    let export = move |_| -> Result<OwnedFd> {
        cuda::make_current(context)?;
        cuda::export_handle(object)
    };
    let service = Service::start(!bootstrap.number, 0, export)?;
    bootstrap.barrier()?;
    Ok((object, Some(service)))
}
