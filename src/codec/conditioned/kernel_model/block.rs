//! A block: one chunk, from base lanes to a status word.

use super::crc::CrcTables;
use super::memory::{LANES, Memory, Payload, Shared, Who};
use super::prologue::{BLOCK, MAP, Prologue, prologue};
use super::status::*;
use super::stream::Stream;
use super::sums::sum_of;
use super::warp::{PerLane, WARP, ballot, inclusive_scan, per_lane, reduce};
use super::{Chunk, Config, Counts, Mode, Outcome, Status};
use crate::lane::{Context, Lane};
use crate::sums::lane_term;

/// Lanes that a warp has of a tile.
const WARP_LANES: usize = WARP * LANES;

/// What a thread holds in registers while it works on a segment.
#[derive(Clone, Copy, Default)]
struct Thread<L> {
    /// Its lanes of this tile and of the next one, from the base.
    lanes: [L; LANES],
    next: [L; LANES],
    /// Classes of its lanes, 4 bits each.
    classes: u32,
    /// Coded lanes of the warp before its own.
    before: u32,
    base_sum: u64,
    target_sum: u64,
    changed: u32,
}

/// A coded lane in the hands of the decoding warp.
#[derive(Clone, Copy, Default)]
struct Item<L> {
    class: u8,
    /// Its lane of the chunk and of the tile; none of a tile for one that was put off.
    position: usize,
    place: Option<usize>,
    base: L,
    /// Whether an exception is for it.
    excepted: bool,
}

/// Registers of a decoding warp.
struct Decoder<L> {
    stream: Stream,
    /// Coded lanes of the tiles before that have not filled a step, and their number.
    items: PerLane<Item<L>>,
    waiting: usize,
    /// First exception that is not before the tile.
    exception: usize,
}

/// A tile of a segment: the lanes that a group works on between two barriers.
#[derive(Clone, Copy)]
struct Tile {
    number: usize,
    first: usize,
    /// End of the segment.
    end: usize,
    is_last: bool,
}

/// Warps that share a segment.
struct Group<'a, L> {
    chunk: &'a Chunk<'a>,
    payload: &'a Payload<'a>,
    /// Nothing for a chunk without changes.
    prologue: Option<&'a Prologue>,
    store: bool,
    backwards: bool,
    number: usize,
    decoding: usize,
    phase: u32,
    threads: Vec<PerLane<Thread<L>>>,
    decoder: Option<Decoder<L>>,
    status: Status,
    counts: Counts,
    // Shared memory.
    /// The tile's lanes: base lanes that become target lanes.
    tile: Shared<L>,
    /// Its coded lanes: place in the tile in bits 0 to 11, class above.
    queue: Shared<u16>,
    /// Coded lanes of each warp, for tiles of even and of odd number.
    totals: Shared<u32>,
    /// Not 0 once the stream is refused.
    broken: Shared<u32>,
}

/// Runs a block on a chunk.
pub fn run<L: Lane>(chunk: &Chunk<'_>, payload: &Payload<'_>, memory: &mut Memory, config: Config) -> Outcome {
    let mut outcome = Outcome { status: OK, base_sum: 0, target_sum: 0, changed: 0, counts: Counts::default() };
    let mut found = None;
    if chunk.num_deltas != 0 {
        let crc = CrcTables::new(config.warps * WARP);
        match prologue(chunk, payload, &crc, config.warps) {
            Ok(prologue) => found = Some(prologue),
            Err(status) => return Outcome { status, ..outcome },
        }
    }
    if memory.mode == Mode::InPlace {
        outcome = pass::<L>(chunk, payload, found.as_ref(), memory, config, false);
        if outcome.status != OK {
            return outcome;
        }
    }
    pass::<L>(chunk, payload, found.as_ref(), memory, config, memory.mode != Mode::Dry)
}

/// Decodes and checks all lanes, and stores them if asked to.
fn pass<L: Lane>(
    chunk: &Chunk<'_>,
    payload: &Payload<'_>,
    prologue: Option<&Prologue>,
    memory: &mut Memory,
    config: Config,
    store: bool,
) -> Outcome {
    let segments = prologue.map_or(1, |prologue| prologue.layout.segments);
    let groups = segments.min(config.warps);
    let blocks = chunk.lanes.div_ceil(BLOCK);
    let mut done: Vec<Group<'_, L>> =
        (0..groups).map(|number| Group::new(chunk, payload, prologue, number, config.warps / groups, config, store)).collect();
    if config.backwards {
        done.reverse();
    }
    for group in &mut done {
        for s in (group.number..segments).step_by(groups) {
            let first = s * blocks / segments * BLOCK;
            let end = ((s + 1) * blocks / segments * BLOCK).min(chunk.lanes);
            group.segment(memory, s, first, end);
        }
    }
    memory.block_barrier();

    // Every warp adds up its threads, one warp all warps; then one thread has the last word.
    let threads = || done.iter().flat_map(|group| &group.threads);
    let sum = |of: fn(&Thread<L>) -> u64| {
        threads().map(|warp| reduce(warp.each_ref().map(of), u64::wrapping_add)).fold(0, u64::wrapping_add)
    };
    let base_sum = sum(|thread| thread.base_sum);
    let target_sum = sum(|thread| thread.target_sum);
    let changed = sum(|thread| thread.changed.into()) as u32;
    let mut status = Status::MAX;
    done.iter().filter(|group| group.status != OK).for_each(|group| status = status.min(group.status));
    if base_sum != chunk.base_sum {
        status = status.min(CHUNK_BASE_SUM);
    }
    if status == Status::MAX {
        status = match () {
            () if changed != chunk.num_deltas => PAYLOAD_DELTAS,
            () if target_sum != chunk.target_sum => CHUNK_TARGET_SUM,
            () => OK,
        };
    }
    let counts = done.iter().fold(Counts::default(), |most, group| most.max(group.counts));
    Outcome { status, base_sum, target_sum, changed, counts }
}

impl<'a, L: Lane> Group<'a, L> {
    fn new(
        chunk: &'a Chunk<'a>,
        payload: &'a Payload<'a>,
        prologue: Option<&'a Prologue>,
        number: usize,
        warps: usize,
        config: Config,
        store: bool,
    ) -> Self {
        Self {
            chunk,
            payload,
            prologue,
            store,
            backwards: config.backwards,
            number,
            decoding: config.decoder % warps,
            phase: 1,
            threads: vec![[Thread::default(); WARP]; warps],
            decoder: None,
            status: OK,
            counts: Counts::default(),
            tile: Shared::new(warps * WARP_LANES),
            queue: Shared::new(warps * WARP_LANES),
            totals: Shared::new(2 * warps),
            broken: Shared::new(1),
        }
    }

    fn who(&self, warp: usize) -> Who {
        Who { group: self.number, phase: self.phase, warp }
    }

    /// A barrier of the group's warps: a named one, or none but that of the warp where it is alone.
    fn barrier(&mut self) {
        self.phase += 1;
        self.counts.barriers += usize::from(self.threads.len() > 1);
    }

    /// What all warps of the group do at the same time.
    fn all_warps(&mut self, mut work: impl FnMut(&mut Self, usize)) {
        let warps = self.threads.len();
        for i in 0..warps {
            work(self, if self.backwards { warps - 1 - i } else { i });
        }
    }

    /// Works through segment `s`, lanes `first` to `end`.
    fn segment(&mut self, memory: &mut Memory, s: usize, first: usize, end: usize) {
        let tile_lanes = self.threads.len() * WARP_LANES;
        let tiles = (end - first).div_ceil(tile_lanes);
        let tile = |number: usize| Tile { number, first: first + number * tile_lanes, end, is_last: number + 1 == tiles };
        self.all_warps(|group, warp| group.load_next(memory, warp, tile(0)));
        self.open(s, first);
        self.barrier();
        for number in 0..tiles {
            let tile = tile(number);
            self.counts.tiles += 1;
            let next = Tile { first: tile.first + tile_lanes, ..tile };
            let mut broken = false;
            self.all_warps(|group, warp| broken = group.broken.get(group.who(warp), 0) != 0);
            if broken || self.prologue.is_none() {
                // Only the sum of the base is still of interest, or there is nothing to decode.
                self.all_warps(|group, warp| {
                    group.take_lanes(warp, tile);
                    group.load_next(memory, warp, next);
                    if !broken {
                        group.copy(memory, warp, tile);
                    }
                });
                continue;
            }
            self.all_warps(|group, warp| group.classify(warp, tile));
            self.barrier();
            let mut coded = 0;
            self.all_warps(|group, warp| {
                coded = group.append(warp, tile);
                group.load_next(memory, warp, next);
            });
            // All warps know whether the decoding one has anything to do.
            let listed = self.prologue.is_some_and(|prologue| prologue.layout.exceptions != 0);
            if coded != 0 || tile.is_last || listed {
                self.barrier();
                let outcome = self.decode(memory, tile, coded);
                self.note(outcome);
                self.barrier();
            }
            self.all_warps(|group, warp| group.hand_out(memory, warp, tile));
        }
        if let Some(decoder) = self.decoder.take()
            && self.status == OK
        {
            let outcome = decoder.stream.finish();
            self.note(outcome);
        }
    }

    /// The decoding warp: keeps a status that is not well.
    fn note(&mut self, outcome: Result<(), Status>) {
        if let Err(status) = outcome {
            self.status = status;
            self.broken.set(self.who(self.decoding), 0, 1);
        }
    }

    /// The decoding warp opens the stream of segment `s`, and looks for the first exception from lane `first` on.
    fn open(&mut self, s: usize, first: usize) {
        if self.status != OK {
            return;
        }
        self.broken.set(self.who(self.decoding), 0, 0);
        let Some(Prologue { layout, streams, .. }) = self.prologue else { return };
        let bits = 8 * L::BYTES as u32 - layout.low_bits;
        match Stream::open(self.payload, streams[s], streams[s + 1], layout.states, bits) {
            Ok(stream) => {
                // Binary search; positions ascend.
                let (mut exception, mut end) = (0, layout.exceptions);
                while exception < end {
                    let middle = (exception + end) / 2;
                    match layout.position(self.payload, middle) < first {
                        true => exception = middle + 1,
                        false => end = middle,
                    }
                }
                let items = [Item::default(); WARP];
                self.decoder = Some(Decoder { stream, items, waiting: 0, exception });
            }
            Err(status) => self.note(Err(status)),
        }
    }

    /// Where the lanes of a thread begin, and how many there are.
    fn own(warp: usize, lane: usize, tile: Tile) -> (usize, usize) {
        let own = tile.first + warp * WARP_LANES + lane * LANES;
        (own, tile.end.saturating_sub(own).min(LANES))
    }

    /// Loads the lanes of a tile: they arrive while the tile before is decoded.
    fn load_next(&mut self, memory: &mut Memory, warp: usize, tile: Tile) {
        let who = self.who(warp);
        for (lane, thread) in self.threads[warp].iter_mut().enumerate() {
            let (own, count) = Self::own(warp, lane, tile);
            thread.next = memory.load(who, own, count);
        }
    }

    /// Makes the loaded lanes the current ones, and adds them to the sum of the base.
    fn take_lanes(&mut self, warp: usize, tile: Tile) {
        for (lane, thread) in self.threads[warp].iter_mut().enumerate() {
            thread.lanes = thread.next;
            let sum = sum_of(Self::own(warp, lane, tile).0, &thread.lanes);
            thread.base_sum = thread.base_sum.wrapping_add(sum);
        }
    }

    /// A tile in which nothing changes.
    fn copy(&mut self, memory: &mut Memory, warp: usize, tile: Tile) {
        let who = self.who(warp);
        for (lane, thread) in self.threads[warp].iter_mut().enumerate() {
            let (own, count) = Self::own(warp, lane, tile);
            thread.target_sum = thread.target_sum.wrapping_add(sum_of(own, &thread.lanes));
            if self.store && memory.mode == Mode::OutOfPlace {
                memory.store(who, own, count, &thread.lanes);
            }
        }
    }

    /// Finds the coded lanes among those loaded, and puts all into the tile. About 5 operations a lane; there is one table
    /// look-up for each, of a table of 260 bytes, so without bank conflicts.
    fn classify(&mut self, warp: usize, tile: Tile) {
        self.take_lanes(warp, tile);
        let who = self.who(warp);
        let Some(Prologue { layout, classes, .. }) = self.prologue else { return };
        let mut coded = [0; WARP];
        for (lane, thread) in self.threads[warp].iter_mut().enumerate() {
            let (own, count) = Self::own(warp, lane, tile);
            thread.classes = 0;
            if count == 0 {
                continue;
            }
            // A thread's lanes lie in one block of lanes.
            let mut map = 0;
            if layout.activity_bits != 0 {
                let bit = own / BLOCK * layout.activity_bits;
                let byte = usize::from(self.payload.byte(layout.activities_at + bit / 8));
                map = MAP * (byte >> (bit % 8) & ((1 << layout.activity_bits) - 1));
            }
            for (k, &base) in thread.lanes[..count].iter().enumerate() {
                // One instruction of Hopper: add, then the least with 64, then the most with 0.
                let index = (context(self.chunk, base) - layout.first_context).clamp(0, 64);
                let class = classes[map + index as usize];
                thread.classes |= u32::from(class) << (4 * k);
                let mut value = base;
                if layout.low_bits != 0 && class == 0 {
                    let delta = L::from_u64(low(self.payload, layout.low_at, own + k, layout.low_bits));
                    thread.changed += u32::from(delta != L::default());
                    value = L::apply(base, delta, self.chunk.dtype.order());
                }
                self.tile.set(who, own - tile.first + k, value);
            }
            let any = thread.classes | thread.classes >> 1;
            coded[lane] = ((any | any >> 2) & 0x1111_1111).count_ones();
        }
        let sums = inclusive_scan(coded);
        for (lane, thread) in self.threads[warp].iter_mut().enumerate() {
            thread.before = sums[lane] - coded[lane];
        }
        self.totals.set(who, tile.number % 2 * self.threads.len() + warp, sums[WARP - 1]);
    }

    /// Lists the coded lanes of a warp behind those of the warps before. Returns how many the tile has.
    fn append(&mut self, warp: usize, tile: Tile) -> usize {
        let who = self.who(warp);
        let warps = self.threads.len();
        // Thread i has the total of warp i.
        let totals = per_lane(|i| if i < warps { self.totals.get(who, tile.number % 2 * warps + i) } else { 0 });
        let sums = inclusive_scan(totals);
        for (lane, thread) in self.threads[warp].iter().enumerate() {
            let mut rank = (sums[warp] - totals[warp] + thread.before) as usize;
            for k in 0..LANES {
                let class = thread.classes >> (4 * k) & 15;
                if class != 0 {
                    let place = warp * WARP_LANES + lane * LANES + k;
                    self.queue.set(who, rank, place as u16 | (class << 12) as u16);
                    rank += 1;
                }
            }
        }
        sums[WARP - 1] as usize
    }

    /// The decoding warp: as many steps as there are coded lanes for, then the exceptions of the tile.
    fn decode(&mut self, memory: &mut Memory, tile: Tile, coded: usize) -> Result<(), Status> {
        let who = self.who(self.decoding);
        let Some(prologue) = self.prologue else { return Ok(()) };
        let Some(decoder) = &mut self.decoder else { return Ok(()) };
        let layout = &prologue.layout;
        let high_mask = 1u64.checked_shl(8 * L::BYTES as u32 - layout.low_bits).unwrap_or(0).wrapping_sub(1);
        let states = layout.states;
        let available = decoder.waiting + coded;
        let steps = if tile.is_last { available.div_ceil(states) } else { available / states };
        // On the device the item of the next step is fetched during this one.
        let mut item = |decoder: &Decoder<L>, tile_lanes: &mut Shared<L>, lane: usize, i: usize| match i < decoder.waiting {
            // Only in the first step, and left where the thread itself has it.
            true => {
                assert_eq!(i, lane);
                decoder.items[lane]
            }
            false => {
                let entry = self.queue.get(who, i - decoder.waiting);
                let place = usize::from(entry & 0xFFF);
                let base = tile_lanes.get(who, place);
                Item { class: (entry >> 12) as u8, position: tile.first + place, place: Some(place), base, excepted: false }
            }
        };
        for step in 0..steps {
            let active = states.min(available - step * states);
            let items = per_lane(|lane| match lane < active {
                true => item(decoder, &mut self.tile, lane, step * states + lane),
                false => Item::default(),
            });
            let values =
                decoder.stream.step(self.payload, &prologue.lookup, &items.map(|item| item.class), active, &mut self.counts)?;
            let mut clash = [false; WARP];
            for (lane, item) in items.iter().enumerate().take(active) {
                let mut delta = values[lane];
                if layout.low_bits != 0 {
                    let high = layout.center.wrapping_sub(delta) & high_mask;
                    delta = high.checked_shl(layout.low_bits).unwrap_or(0)
                        | low(self.payload, layout.low_at, item.position, layout.low_bits);
                }
                if delta == 0 {
                    continue;
                }
                let thread = &mut self.threads[self.decoding][lane];
                let target = L::apply(item.base, L::from_u64(delta), self.chunk.dtype.order());
                thread.changed += 1;
                match item.place {
                    Some(place) => self.tile.set(who, place, target),
                    // Its tile has been handed out with the base lane.
                    None => {
                        clash[lane] = item.excepted;
                        thread.target_sum = thread.target_sum.wrapping_add(lane_term(item.position, item.base, target));
                        if self.store {
                            memory.store_lane(who, item.position, target);
                        }
                    }
                }
            }
            if ballot(&clash) != 0 {
                return Err(PAYLOAD_POSITIONS);
            }
        }
        // Fewer lanes than states are left, and wait for the next tile in registers.
        let used = available.min(steps * states);
        let waiting = available - used;
        let items = per_lane(|lane| match lane < waiting {
            true => Item { place: None, ..item(decoder, &mut self.tile, lane, used + lane) },
            false => Item::default(),
        });
        self.counts.put_off += waiting - if used == 0 { decoder.waiting } else { 0 };
        (decoder.items, decoder.waiting) = (items, waiting);
        self.except(memory, tile)
    }

    /// The decoding warp: makes the changes of the tile that are listed. They are for lanes that no value has changed, so the
    /// base is read again to compare: in place, no lane of this tile has been stored yet.
    fn except(&mut self, memory: &mut Memory, tile: Tile) -> Result<(), Status> {
        let who = self.who(self.decoding);
        let (Some(Prologue { layout, .. }), Some(decoder)) = (self.prologue, &mut self.decoder) else { return Ok(()) };
        let end = (tile.first + self.threads.len() * WARP_LANES).min(tile.end);
        loop {
            let position = per_lane(|lane| layout.position(self.payload, decoder.exception + lane));
            let mut clash = [false; WARP];
            let inside = position.map(|position| position < end);
            for lane in (0..WARP).filter(|&lane| inside[lane]) {
                let exception = decoder.exception + lane;
                let delta = self.payload.unaligned(layout.deltas_at + L::BYTES * exception, L::BYTES);
                let place = position[lane] - tile.first;
                let base: L = memory.load_lane(who, position[lane]);
                clash[lane] = self.tile.get(who, place) != base;
                self.tile.set(who, place, L::apply(base, L::from_u64(delta), self.chunk.dtype.order()));
                self.threads[self.decoding][lane].changed += 1;
                // Shuffles: is it one that waits for its value? That must then turn out to be 0.
                decoder.items.iter_mut().take(decoder.waiting).for_each(|item| item.excepted |= item.position == position[lane]);
            }
            if ballot(&clash) != 0 {
                return Err(PAYLOAD_POSITIONS);
            }
            let count = ballot(&inside).count_ones() as usize;
            decoder.exception += count;
            if count < WARP {
                return Ok(());
            }
        }
    }

    /// The tile's lanes are the target's, but for those that were put off.
    fn hand_out(&mut self, memory: &mut Memory, warp: usize, tile: Tile) {
        let who = self.who(warp);
        for (lane, thread) in self.threads[warp].iter_mut().enumerate() {
            let (own, count) = Self::own(warp, lane, tile);
            let mut target = [L::default(); LANES];
            for (k, target) in target[..count].iter_mut().enumerate() {
                *target = self.tile.get(who, own - tile.first + k);
            }
            thread.target_sum = thread.target_sum.wrapping_add(sum_of(own, &target));
            let stored = self.store && (memory.mode != Mode::InPlace || target != thread.lanes);
            if stored {
                memory.store(who, own, count, &target);
            }
        }
    }
}

/// The context of a base lane (`spec/codecs.md` section 4.1): 1 to 3 operations.
fn context<L: Lane>(chunk: &Chunk<'_>, base: L) -> i32 {
    let bits = |lane: L| (64 - lane.to_u64().leading_zeros()) as i32;
    match chunk.dtype.context() {
        Context::Exponent { shift, bits } => (base.to_u64() >> shift) as i32 & ((1 << bits) - 1),
        Context::SignedBits if base.to_u64() >> (8 * L::BYTES - 1) == 1 => bits(L::from_u64(!base.to_u64())),
        Context::SignedBits | Context::Bits => bits(base),
    }
}

/// The low bits of lane `at`, `count` of them.
fn low(payload: &Payload<'_>, low_at: usize, at: usize, count: u32) -> u64 {
    payload.bits(8 * low_at + at * count as usize, count)
}
