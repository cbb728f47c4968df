//! Layouts against lists of the offsets of all bytes.

use super::*;
use crate::rectangle::{overlap, part_fault};
use proptest::prelude::*;

/// A shape and a rectangle of it.
fn rectangles() -> impl Strategy<Value = (Vec<u64>, Rectangle)> {
    prop::collection::vec((1u64..7, any::<u64>(), any::<u64>()), 0..5).prop_map(|dims| {
        let shape: Vec<_> = dims.iter().map(|d| d.0).collect();
        let origin: Vec<_> = dims.iter().map(|(dim, a, _)| a % dim).collect();
        let extent: Vec<_> = dims.iter().zip(&origin).map(|((dim, _, b), origin)| 1 + b % (dim - origin)).collect();
        (shape, Rectangle::new(origin, extent))
    })
}

/// Another rectangle of a shape.
fn rectangle_of(shape: &[u64], numbers: [u64; 8]) -> Rectangle {
    let origin: Vec<u64> = shape.iter().zip(numbers).map(|(dim, n)| n % dim).collect();
    let room = shape.iter().zip(&origin).zip(&numbers[4..]);
    Rectangle::new(origin.clone(), room.map(|((dim, from), n)| 1 + n % (dim - from)).collect::<Vec<_>>())
}

/// The index in the tensor of each element of a rectangle, in row-major order, from the definition.
fn elements(shape: &[u64], part: &Rectangle) -> Vec<u64> {
    let index = |element: u64, dim: usize| element / shape[dim + 1..].iter().product::<u64>() % shape[dim];
    let is_inside = |element: &u64| {
        (0..shape.len()).all(|dim| (part.origin[dim]..part.origin[dim] + part.extent[dim]).contains(&index(*element, dim)))
    };
    (0..shape.iter().product()).filter(is_inside).collect()
}

/// A layout, and the offsets of its bytes in order from the definition. Bytes may overlap, and dimensions come in any order.
fn layouts() -> impl Strategy<Value = (StridedLayout, Vec<u64>)> {
    (0u64..40, 0u64..5, prop::collection::vec((0u64..5, 0u64..20), 0..4)).prop_map(|(start, run, dims)| {
        let mut offsets = vec![start];
        for (extent, stride) in dims.iter().chain([&(run, 1)]) {
            offsets = offsets.iter().flat_map(|at| (0..*extent).map(move |i| at + i * stride)).collect();
        }
        (StridedLayout::new(start, run, dims), offsets)
    })
}

/// The offsets of all bytes, as the layout goes through them.
fn offsets(layout: &StridedLayout, position: u64, size: usize) -> Vec<u64> {
    let mut found = Vec::new();
    let each = |at: u64, range: Range<usize>| {
        assert_eq!(found.len(), range.start);
        found.extend(at..at + range.len() as u64);
        Ok::<_, ()>(())
    };
    layout.try_each(position, size, each).unwrap();
    found
}

fn of_rectangle(bits: u64, shape: &[u64], part: &Rectangle) -> StridedLayout {
    StridedLayout::of_rectangle(bits, shape, None, &part.origin, &part.extent)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_layout_has_the_bytes_of_its_definition((layout, expected) in layouts(), from: u64, to: u64) {
        prop_assert_eq!(layout.bytes(), expected.len() as u64);
        let from = from % (layout.bytes() + 1);
        let size = (to % (layout.bytes() - from + 1)) as usize;
        let part = &expected[from as usize..][..size];
        prop_assert_eq!(&offsets(&layout, from, size)[..], part);
        for (position, at) in expected.iter().enumerate() {
            prop_assert_eq!(layout.at(position as u64), *at);
        }
        if let (Some(first), Some(last)) = (expected.iter().min(), expected.iter().max()) {
            prop_assert_eq!((layout.start(), layout.end()), (*first, *last + 1));
        }
        let is_contiguous = part.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        match layout.contiguous_at(from, size) {
            Some(at) if size > 0 => prop_assert!(is_contiguous && at == part[0]),
            Some(_) => {}
            // Runs may touch where one dimension ends and the next one goes on.
            None => prop_assert!(size > 0),
        }
    }

    #[test]
    fn layouts_of_the_same_bytes_are_equal((layout, bytes) in layouts(), split in 1u64..4) {
        // A dimension, split in two.
        let mut dims = layout.dims.clone();
        if let Some(i) = dims.iter().position(|(extent, _)| extent % split == 0) {
            let (extent, stride) = dims[i];
            dims.splice(i..=i, [(extent / split, stride * split), (split, stride)]);
        }
        dims.push((layout.run, 1));
        let other = StridedLayout::new(layout.start, 1, dims);
        prop_assert_eq!(offsets(&other, 0, other.bytes() as usize), bytes);
        prop_assert!(other == layout || layout.bytes() == 0, "{:?} {:?}", other, layout);
    }

    #[test]
    fn two_layouts_overlap_if_they_have_a_byte_in_common((a, of_a) in layouts(), (b, of_b) in layouts(), same: bool) {
        // Equal strides, as those of tensors beside each other in the rows of one parameter.
        let (b, of_b) = if same { (StridedLayout { start: b.start, run: b.run.min(a.run), ..a.clone() }, Vec::new()) } else { (b, of_b) };
        let of_b = if same && b.run > 0 { offsets(&b, 0, b.bytes() as usize) } else { of_b };
        let expected = of_a.iter().any(|byte| of_b.contains(byte));
        prop_assert_eq!(a.overlaps(&b), expected, "{:?} {:?}", &a, &b);
        prop_assert_eq!(b.overlaps(&a), expected);
    }

    #[test]
    fn memories_are_equal_or_apart_or_refused(layouts in prop::collection::vec(layouts(), 0..7), again in prop::collection::vec(0..7usize, 0..4)) {
        let mut layouts = layouts;
        let further: Vec<_> = again.iter().filter_map(|&i| layouts.get(i).cloned()).collect();
        layouts.extend(further);
        let all: Vec<_> = layouts.iter().map(|(layout, _)| layout.clone()).collect();
        let meet = |a: usize, b: usize| layouts[a].1.iter().any(|byte| layouts[b].1.contains(byte));
        let is_same = |a: usize, b: usize| layouts[a].1 == layouts[b].1;
        match relation(&all) {
            Ok(first_of) => {
                prop_assert_eq!(first_of.len(), all.len());
                for (b, first) in first_of.into_iter().enumerate() {
                    prop_assert_eq!(first, (0..b).find(|&a| meet(a, b)).unwrap_or(b));
                    prop_assert!(is_same(first, b));
                }
            }
            Err([a, b]) => prop_assert!(a != b && meet(a, b) && !is_same(a, b) && all[a].start <= all[b].start),
        }
        let moved: Vec<_> = all.iter().map(|layout| layout.clone().shifted(1000)).collect();
        prop_assert_eq!(relation(&moved), relation(&all));
    }

    #[test]
    fn an_output_that_shares_bytes_with_a_source_is_found(
        outputs in prop::collection::vec(layouts(), 0..6),
        sources in prop::collection::vec(layouts(), 0..6),
    ) {
        let [of_outputs, of_sources] = [&outputs, &sources].map(|all| all.iter().map(|(layout, _)| layout.clone()).collect::<Vec<_>>());
        let meet = |a: usize, b: usize| outputs[a].1.iter().any(|byte| sources[b].1.contains(byte));
        let expected = (0..sources.len()).find(|&b| (0..outputs.len()).any(|a| meet(a, b)));
        let found = first_shared(&of_outputs, &of_sources);
        prop_assert_eq!(found.map(|[_, source]| source), expected);
        prop_assert!(found.is_none_or(|[a, b]| meet(a, b)));
    }

    #[test]
    fn a_composed_layout_leads_through_both((outer, of_outer) in layouts(), (inner, of_inner) in layouts()) {
        let Some(composed) = outer.compose(&inner) else { return Ok(()) };
        let expected: Vec<_> = of_inner.iter().map(|&position| of_outer[position as usize]).collect();
        prop_assert_eq!(offsets(&composed, 0, composed.bytes() as usize), expected);
    }

    #[test]
    fn a_rectangle_of_a_rectangle_is_composed((shape, part) in rectangles(), numbers: [u64; 8]) {
        let within = rectangle_of(&part.extent, numbers);
        let origin: Vec<_> = within.origin.iter().zip(&part.origin).map(|(a, b)| a + b).collect();
        let composed = of_rectangle(16, &shape, &part).compose(&of_rectangle(16, &part.extent, &within));
        prop_assert_eq!(composed, Some(of_rectangle(16, &shape, &Rectangle::new(origin, within.extent))));
    }

    #[test]
    fn a_permuted_tensor_has_its_elements_in_the_order_of_the_other_dimensions((shape, _) in rectangles(), keys: [u64; 4]) {
        let mut order: Vec<usize> = (0..shape.len()).collect();
        order.sort_by_key(|&dim| keys[dim]);
        let whole = of_rectangle(16, &shape, &Rectangle::whole(&shape));
        let permuted = whole.permute(2, &shape, &order).unwrap();
        let mut expected = vec![0];
        for &dim in &order {
            let stride = 2 * shape[dim + 1..].iter().product::<u64>();
            expected = expected.iter().flat_map(|at| (0..shape[dim]).map(move |i| at + i * stride)).collect();
        }
        let expected: Vec<u64> = expected.iter().flat_map(|at| [*at, at + 1]).collect();
        prop_assert_eq!(offsets(&permuted, 0, permuted.bytes() as usize), expected);
        prop_assert_eq!(whole.permute(2, &shape, &vec![0; shape.len() + 1]), None);
        prop_assert_eq!(whole.permute(3, &shape, &order), None);
    }

    #[test]
    fn a_rectangle_has_the_bytes_of_its_elements((shape, part) in rectangles(), gap in 0u64..4, with_pitch: bool) {
        let row = 2 * shape.last().copied().unwrap_or(1);
        let pitch = (with_pitch && !shape.is_empty()).then_some(row + gap);
        let layout = StridedLayout::of_rectangle(16, &shape, pitch, &part.origin, &part.extent);
        let at = |element: u64| if pitch.is_some() { 2 * element / row * (row + gap) + 2 * element % row } else { 2 * element };
        let bytes: Vec<u64> = elements(&shape, &part).iter().flat_map(|element| [at(*element), at(*element) + 1]).collect();
        prop_assert_eq!(&offsets(&layout, 0, layout.bytes() as usize), &bytes);
        for offset in 0..=layout.end() + 3 {
            let before = bytes.iter().filter(|byte| **byte < offset).count() as u64;
            prop_assert_eq!(layout.before(offset), before, "before {}", offset);
        }
    }

    #[test]
    fn rectangles_are_covered_if_all_their_elements_are(
        (shape, part) in rectangles(),
        others in prop::collection::vec((0u64..3, any::<u64>()), 0..4),
    ) {
        // Origins near zero, so that covers are not rare.
        let others: Vec<_> = others.iter().map(|&(a, b)| rectangle_of(&shape, [a, a, a, a, b, b, b, b])).collect();
        let covered: Vec<_> = others.iter().flat_map(|other| elements(&shape, other)).collect();
        let expected = elements(&shape, &part).iter().all(|element| covered.contains(element));
        let others: Vec<_> = others.iter().map(|other| of_rectangle(16, &shape, other)).collect();
        prop_assert_eq!(of_rectangle(16, &shape, &part).is_covered_by(&others), expected);
    }

    #[test]
    fn a_placement_leads_from_an_array_to_memory(
        (shape, array) in rectangles(),
        numbers: [u64; 8],
        (gap, shift) in (0u64..4, 0u64..9),
        (from, to) in any::<(u64, u64)>(),
    ) {
        let held = rectangle_of(&shape, numbers);
        let pitch = held.extent.last().filter(|_| gap > 0).map(|row| 2 * row + gap);
        let memory = StridedLayout::of_rectangle(16, &held.extent, pitch, &vec![0; shape.len()], &held.extent);
        // For each byte of the array, its offset in memory.
        let of_held = elements(&shape, &held);
        let place = |element: &u64| Some(2 * of_held.iter().position(|held| held == element)? as u64);
        let places: Vec<Option<u64>> = elements(&shape, &array)
            .iter()
            .flat_map(|element| [0, 1].map(|byte| Some(memory.at(place(element)? + byte) + shift)))
            .collect();
        let placement = Placement::of_rectangles(16, &array, &held, pitch).map(|placement| placement.shifted(shift));
        prop_assert_eq!(placement.is_some(), overlap([&array, &held]).is_some());
        let Some(placement) = placement else { return Ok(()) };
        check(&placement, &places, from, to)?;
    }

    #[test]
    fn a_range_of_a_tensor_is_placed((shape, part) in rectangles(), (a, b) in any::<(u64, u64)>(), (from, to) in any::<(u64, u64)>()) {
        let bytes = 2 * shape.iter().product::<u64>();
        let held = a % (bytes + 1)..bytes.min(a % (bytes + 1) + b % 40);
        let tensor = of_rectangle(16, &shape, &part);
        let places: Vec<_> = (0..tensor.bytes()).map(|p| Some(tensor.at(p)).filter(|at| held.contains(at)).map(|at| at - held.start)).collect();
        check(&Placement::of_range(tensor, &held), &places, from, to)?;
    }
}

/// Compares a placement with the offset in memory of each byte of the array.
fn check(placement: &Placement, places: &[Option<u64>], from: u64, to: u64) -> Result<(), TestCaseError> {
    let from = from as usize % (places.len() + 1);
    let size = to as usize % (places.len() - from + 1);
    let part = &places[from..][..size];
    let mut found = vec![None; size];
    let mut runs = 0;
    let each = |at: usize, range: Range<usize>| {
        range.enumerate().for_each(|(i, position)| found[position] = Some((at + i) as u64));
        runs += 1;
        Ok::<_, ()>(())
    };
    let count = placement.try_each(from as u64, size, each).unwrap();
    prop_assert!(runs <= placement.max_runs(from as u64, size), "{} runs", runs);
    prop_assert_eq!(&found[..], part);
    prop_assert_eq!(count, part.iter().flatten().count());
    prop_assert_eq!(placement.count(from as u64, size), count);
    if let Some(at) = placement.contiguous_at(from as u64, size).filter(|_| size > 0) {
        prop_assert!(part.iter().enumerate().all(|(i, place)| *place == Some((at + i) as u64)));
    }
    Ok(())
}

#[test]
fn packed_elements_are_in_whole_bytes() {
    // Elements of 4 bits: columns 2 to 5 of rows of 6.
    let columns = StridedLayout::of_rectangle(4, &[4, 6], None, &[0, 2], &[4, 4]);
    assert_eq!(columns, StridedLayout::new(1, 2, [(4, 3)]));
    // The rows of a whole tensor need not be whole bytes.
    assert_eq!(StridedLayout::of_rectangle(4, &[2, 3], None, &[0, 0], &[2, 3]), StridedLayout::contiguous(0, 3));
    assert_eq!(part_fault(4, &[4, 3, 2], &[1, 0, 0], &[2, 3, 2]), None);
    assert_eq!(StridedLayout::of_rectangle(4, &[4, 3, 2], None, &[1, 0, 0], &[2, 3, 2]), StridedLayout::contiguous(3, 6));
}

#[test]
fn empty_and_huge_arrays() {
    let empty = StridedLayout::of_rectangle(16, &[1 << 40, 1 << 40, 0], None, &[0, 0, 0], &[1 << 40, 1 << 40, 0]);
    assert_eq!((empty.bytes(), empty.end()), (0, 0));
    assert!(offsets(&empty, 0, 5).is_empty() && !empty.overlaps(&empty));
    assert_eq!(empty.permute(2, &[0, 1 << 40, 1 << 40], &[2, 0, 1]), Some(empty.clone()));
    assert_eq!(StridedLayout::new(0, 8, [(0, 1), (1 << 62, 8)]).bytes(), 0);
    assert_eq!(StridedLayout::new(0, 1, [(1 << 40, 0), (1 << 40, 0)]).bytes(), u64::MAX);
    // Rows of 2^30 pairs of tensors beside each other are compared at once.
    let rows = |start| StridedLayout::new(start, 1 << 20, [(1 << 30, 1 << 21)]);
    assert!(!rows(0).overlaps(&rows(1 << 20)));
    assert!(rows(0).overlaps(&rows((1 << 20) - 1)));
    assert!(rows(0).overlaps(&StridedLayout::contiguous((1 << 50) + (1 << 20) - 1, 1)));
    assert!(!rows(0).overlaps(&StridedLayout::contiguous((1 << 50) + (1 << 20), 1)));
}
