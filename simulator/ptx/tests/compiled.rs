//! Kernels that NVRTC compiled from tests/kernels/*.cu, for several targets, against results computed here.

mod support;

use support::{Shape, TestMemory, arg, image, launch};

/// Runs a check on the PTX of one source for every target it was compiled for.
fn for_each_target(source: &str, check: impl Fn(&str)) {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kernels");
    let mut targets = 0;
    for target in [52, 70, 90, 100] {
        if let Ok(text) = std::fs::read_to_string(format!("{directory}/{source}.sm_{target}.ptx")) {
            targets += 1;
            check(&text);
        }
    }
    assert!(targets >= 3, "{source}");
}

/// Reproducible random numbers from -0.5 to 0.5.
fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut numbers = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| numbers.f32() - 0.5).take(count).collect()
}

fn assert_near(actual: &[f32], expected: &[f32], relative: f32) {
    assert_eq!(actual.len(), expected.len());
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((a - e).abs() <= relative * e.abs().max(1e-6), "element {index}: {a} instead of {e}");
    }
}

#[test]
fn vector_add() {
    for_each_target("training", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let (a, b) = (noise(1000, 1), noise(1000, 2));
        let (da, db, out) = (memory.put(&a), memory.put(&b), memory.alloc(4096));
        let args = [arg(da), arg(db), arg(out), arg(1000i32)];
        launch(&image, "vector_add", &Shape::new(8, 128), &args, &memory).unwrap();
        let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).chain([0.0; 24]).collect();
        assert_eq!(memory.get::<f32>(out, 1024), expected);
    });
}

#[test]
fn tiled_matrix_product() {
    let (m, n, k) = (50usize, 33usize, 70usize);
    for_each_target("training", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let (a, b) = (noise(m * k, 3), noise(k * n, 4));
        let (da, db, dc) = (memory.put(&a), memory.put(&b), memory.alloc(m * n * 4));
        let args = [arg(da), arg(db), arg(dc), arg(m as i32), arg(n as i32), arg(k as i32)];
        let shape = Shape { grid: [3, 4, 1], block: [16, 16, 1], ..Shape::new(1, 1) };
        launch(&image, "matmul", &shape, &args, &memory).unwrap();
        let mut expected = vec![0f32; m * n];
        for row in 0..m {
            for column in 0..n {
                // The tail of the last tile adds 0 * 0, which changes nothing.
                expected[row * n + column] =
                    (0..k).fold(0.0, |sum: f32, i| a[row * k + i].mul_add(b[i * n + column], sum));
            }
        }
        assert_eq!(memory.get::<f32>(dc, m * n), expected);
    });
}

#[test]
fn sum_by_shuffles_and_atomics() {
    for_each_target("training", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        // Small integers, whose sum is exact in any order.
        let values: Vec<f32> = (0..10_000).map(|i| (i % 17) as f32 - 8.0).collect();
        let (input, out) = (memory.put(&values), memory.alloc(8));
        let args = [arg(input), arg(out), arg(10_000i32)];
        for round in 1..=2 {
            launch(&image, "reduce_sum", &Shape::new(7, 256), &args, &memory).unwrap();
            let sum = values.iter().sum::<f32>() * round as f32;
            assert_eq!(memory.get::<f32>(out, 2), [sum, 7.0]);
        }
    });
}

#[test]
fn adam_step() {
    for_each_target("training", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let n = 300;
        let (w, g, m, v) = (noise(n, 5), noise(n, 6), noise(n, 7), noise(n, 8));
        let v: Vec<f32> = v.iter().map(|v| v.abs()).collect();
        let [dw, dg, dm, dv] = [&w, &g, &m, &v].map(|values| memory.put(values));
        let (rate, beta1, beta2, epsilon, step) = (1e-3f32, 0.9f32, 0.999f32, 1e-8f32, 3i32);
        let mut args: Vec<Vec<u8>> = [dw, dg, dm, dv].iter().map(|address| arg(*address)).collect();
        args.push(arg(n as i32));
        args.extend([rate, beta1, beta2, epsilon].map(arg));
        args.push(arg(step));
        launch(&image, "adam", &Shape::new(3, 128), &args, &memory).unwrap();
        let mut expected = w.clone();
        for i in 0..n {
            let m1 = beta1 * m[i] + (1.0 - beta1) * g[i];
            let v1 = beta2 * v[i] + (1.0 - beta2) * g[i] * g[i];
            let (m_hat, v_hat) = (m1 / (1.0 - beta1.powi(step)), v1 / (1.0 - beta2.powi(step)));
            expected[i] = w[i] - rate * m_hat / (v_hat.sqrt() + epsilon);
        }
        assert_near(&memory.get::<f32>(dw, n), &expected, 1e-5);
    });
}

#[test]
fn softmax_of_rows() {
    for_each_target("training", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let (rows, columns) = (5usize, 77usize);
        let values: Vec<f32> = noise(rows * columns, 9).iter().map(|v| v * 20.0).collect();
        let (input, out) = (memory.put(&values), memory.alloc(rows * columns * 4));
        let shape = Shape { shared: 64 * 4, ..Shape::new(rows as u32, 64) };
        let args = [arg(input), arg(out), arg(columns as i32)];
        launch(&image, "softmax", &shape, &args, &memory).unwrap();
        let mut expected = Vec::new();
        for row in values.chunks(columns) {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|v| f64::from(v - most).exp()).sum();
            expected.extend(row.iter().map(|v| (f64::from(v - most).exp() / sum) as f32));
        }
        assert_near(&memory.get::<f32>(out, rows * columns), &expected, 1e-5);
    });
}

#[test]
fn prefix_sums_and_sorting() {
    for_each_target("algorithms", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let values: Vec<u32> = (0..600u32).map(|i| i.wrapping_mul(2_654_435_761) >> 20).collect();
        let (input, out) = (memory.put(&values), memory.alloc(600 * 4));
        let shape = Shape { shared: 256 * 4, ..Shape::new(3, 256) };
        launch(&image, "prefix_sum", &shape, &[arg(input), arg(out), arg(600i32)], &memory).unwrap();
        let sums = values.chunks(256).flat_map(|block| {
            block.iter().scan(0u32, |sum, v| {
                *sum += v;
                Some(*sum)
            })
        });
        assert_eq!(memory.get::<u32>(out, 600), sums.collect::<Vec<_>>());

        let mut values: Vec<i32> = (0..1024i32).map(|i| i.wrapping_mul(-1_640_531_535) >> 7).collect();
        let data = memory.put(&values);
        launch(&image, "bitonic_sort", &Shape::new(2, 512), &[arg(data)], &memory).unwrap();
        values.chunks_mut(512).for_each(<[i32]>::sort_unstable);
        assert_eq!(memory.get::<i32>(data, 1024), values);
    });
}

fn philox(counter: [u32; 4], seed: u32) -> [u32; 4] {
    let (mut c, mut key) = (counter, [seed, 0x1234_5678u32]);
    let wide = |a: u32, b: u32| {
        let product = u64::from(a) * u64::from(b);
        ((product >> 32) as u32, product as u32)
    };
    for _ in 0..10 {
        let ((high0, low0), (high1, low1)) = (wide(0xD251_1F53, c[0]), wide(0xCD9E_8D57, c[2]));
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

#[test]
fn random_numbers() {
    for_each_target("algorithms", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let out = memory.alloc(128 * 4);
        let args = [arg(out), arg(42u32), arg(20i32)];
        launch(&image, "philox_walk", &Shape::new(2, 64), &args, &memory).unwrap();
        let walk = |thread: u32| -> i32 {
            let bits = (0..20).flat_map(|round| philox([round, thread, 0, 0], 42));
            bits.map(|word| 2 * word.count_ones() as i32 - 32).sum()
        };
        assert_eq!(memory.get::<i32>(out, 128), (0..128).map(walk).collect::<Vec<_>>());

        let seeds: Vec<u64> = (1..=64u64).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
        let state = memory.put(&seeds);
        launch(&image, "xorshift", &Shape::new(1, 64), &[arg(state), arg(17i32)], &memory).unwrap();
        let expected = seeds.iter().map(|seed| {
            let mut x = *seed;
            for _ in 0..17 {
                x ^= x >> 12;
                x ^= x << 25;
                x ^= x >> 27;
            }
            x.wrapping_mul(0x2545_F491_4F6C_DD1D)
        });
        assert_eq!(memory.get::<u64>(state, 64), expected.collect::<Vec<_>>());
    });
}

#[test]
fn histogram_by_atomics() {
    for_each_target("algorithms", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let data: Vec<u8> =
            (0..5000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 & 0x3f).collect();
        let (input, bins) = (memory.put(&data), memory.alloc(1024));
        let args = [arg(input), arg(bins), arg(5000i32)];
        launch(&image, "histogram", &Shape::new(5, 96), &args, &memory).unwrap();
        let mut expected = vec![0u32; 256];
        data.iter().for_each(|byte| expected[usize::from(*byte)] += 1);
        assert_eq!(memory.get::<u32>(bins, 256), expected);
    });
}

/// binary16 to f64, for the expected values only.
fn half_value(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-24),
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

#[test]
fn sixteen_bit_floats() {
    for_each_target("half", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        // Multiples of 1/8 up to 16: products and sums of them are exact in f16.
        let exact = |seed| noise(256, seed).iter().map(|v| (v * 64.0).round() / 8.0).collect::<Vec<f32>>();
        let to_half = |v: &f32| (0..=u16::MAX).find(|h| half_value(*h) == f64::from(*v)).unwrap();
        let (x, y) = (exact(1), exact(2));
        let halves = |values: &[f32]| values.iter().map(to_half).collect::<Vec<u16>>();
        let (dx, dy) = (memory.put(&halves(&x)), memory.put(&halves(&y)));
        launch(
            &image,
            "half_axpy",
            &Shape::new(2, 128),
            &[arg(dx), arg(dy), arg(0.5f32), arg(256i32)],
            &memory,
        )
        .unwrap();
        let result: Vec<f64> = memory.get::<u16>(dy, 256).iter().map(|h| half_value(*h)).collect();
        let expected = x.iter().zip(&y).map(|(x, y)| f64::from(0.5 * x + y));
        assert_eq!(result, expected.collect::<Vec<_>>());

        let (dx, dy, out) = (memory.put(&halves(&x)), memory.put(&halves(&y)), memory.alloc(512));
        launch(&image, "half2_ops", &Shape::new(1, 128), &[arg(dx), arg(dy), arg(out), arg(128i32)], &memory)
            .unwrap();
        let result: Vec<f64> = memory.get::<u16>(out, 256).iter().map(|h| half_value(*h)).collect();
        for (i, result) in result.iter().enumerate() {
            let expected = f64::from(x[i] * y[i] + (x[i] - y[i]));
            assert!((result - expected).abs() <= expected.abs() / 500.0 + 1e-3, "{result} {expected}");
        }

        let compared = memory.alloc(1024);
        let (dx, dy) =
            (memory.put(&[0x3c00u16, 0x3c00, 0x7e00, 0xbc00]), memory.put(&[0x4000u16, 0x3c00, 0, 0x7e00]));
        let args = [arg(dx), arg(dy), arg(compared), arg(4i32)];
        launch(&image, "half_compare", &Shape::new(1, 32), &args, &memory).unwrap();
        assert_eq!(memory.get::<i32>(compared, 4), [1, 2, 4 | 8, 4]);
    });
}

#[test]
fn bf16_conversions() {
    for_each_target("half", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let values = noise(200, 11);
        let (input, narrow, out) = (memory.put(&values), memory.alloc(400), memory.alloc(800));
        let args = [arg(input), arg(narrow), arg(out), arg(200i32)];
        launch(&image, "bf16_round_trip", &Shape::new(2, 128), &args, &memory).unwrap();
        let expected = values.iter().map(|v| {
            let bits = v.to_bits();
            ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
        });
        assert_eq!(memory.get::<u16>(narrow, 200), expected.collect::<Vec<_>>());
        for (value, result) in values.iter().zip(memory.get::<f32>(out, 200)) {
            assert!((result - 2.0 * value).abs() <= value.abs() / 200.0 + 1e-6, "{result} {value}");
        }
    });
}

#[test]
fn switches_loops_and_structs() {
    for_each_target("language", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let rounds: Vec<i32> = (0..64).map(|i| i * 3 % 40).collect();
        let (input, out) = (memory.put(&rounds), memory.alloc(256));
        launch(&image, "switches", &Shape::new(2, 32), &[arg(input), arg(out), arg(64i32)], &memory).unwrap();
        let classify = |v: i32| match v {
            0 => 100,
            1 => 7,
            2 => -2,
            3 => 48,
            4 => 4 ^ 0x55,
            5 => 25,
            6 => 1234,
            7 => !7,
            8 => 2,
            _ => -1,
        };
        let expected = rounds.iter().map(|rounds| {
            let mut total = 0;
            for round in (0..*rounds).filter(|round| round % 3 != 1) {
                total += classify(round);
                if total > 5000 {
                    break;
                }
            }
            total
        });
        assert_eq!(memory.get::<i32>(out, 64), expected.collect::<Vec<_>>());

        // A particle has 6 floats, a char and, at offset 32, a double: 40 bytes. Settings: 4 + 4 + 10 bytes.
        let particles = memory.alloc(40 * 10);
        for i in 0..10u64 {
            let at = particles + 40 * i;
            let floats = [1.0f32, 2.0, 3.0, 0.5, i as f32, -1.0];
            memory.write_bytes(at, &floats.iter().flat_map(|f| f.to_le_bytes()).collect::<Vec<_>>());
            memory.write_bytes(at + 24, &[i as u8]);
            memory.write_bytes(at + 32, &(i as f64 * 1.5).to_le_bytes());
        }
        let mut settings = [0.25f32.to_le_bytes(), 9i32.to_le_bytes()].concat();
        settings.extend([5i16, -1, 7, 100, 3].iter().flat_map(|f| f.to_le_bytes()));
        settings.resize(20, 0);
        launch(&image, "particles", &Shape::new(1, 32), &[arg(particles), settings], &memory).unwrap();
        for i in 0..10u64 {
            let at = particles + 40 * i;
            let moved = if i < 9 { 0.25 } else { 0.0 };
            let expected = [1.0 + moved * 0.5, 2.0 + moved * i as f32, 3.0 - moved];
            assert_eq!(memory.get::<f32>(at, 3), expected);
            let flag = if i < 9 { [5, -1, 7, 100, 3][i as usize % 5] } else { 0 };
            assert_eq!(memory.get::<i8>(at + 24, 1), [i as i8 + flag]);
            let mass = i as f64 * 1.5;
            assert_eq!(memory.get::<f64>(at + 32, 1), [if i < 9 { mass / 3.0 + i as f64 } else { mass }]);
        }
    });
}

#[test]
fn recursion_and_pointers_to_functions() {
    for_each_target("language", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let out = memory.alloc(64 * 8);
        launch(&image, "recursion", &Shape::new(1, 64), &[arg(out)], &memory).unwrap();
        let mut fibonacci = vec![0u64, 1];
        (2..16).for_each(|i| fibonacci.push(fibonacci[i - 1] + fibonacci[i - 2]));
        let expected: Vec<u64> = (0..64).map(|i| fibonacci[i % 16]).collect();
        assert_eq!(memory.get::<u64>(out, 64), expected);

        let values: Vec<f32> = (0..64).map(|i| i as f32 - 20.0).collect();
        let data = memory.put(&values);
        launch(&image, "indirect", &Shape::new(1, 64), &[arg(data)], &memory).unwrap();
        let apply = |(i, v): (usize, &f32)| [2.0 * v, v * v, -v][i % 3];
        assert_eq!(memory.get::<f32>(data, 64), values.iter().enumerate().map(apply).collect::<Vec<_>>());
    });
}

#[test]
fn variables_of_the_module() {
    for_each_target("language", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let out = memory.alloc(32 * 4);
        launch(&image, "globals", &Shape::new(1, 32), &[arg(out)], &memory).unwrap();
        let table = [3, 1, 4, 1, 5, 9, 2, 6];
        let counters = [10, 20, 30 + 4 * table.iter().sum::<i32>(), 40];
        let expected: Vec<i32> = (0..32).map(|i| table[i * 3 % 8] + counters[i % 4]).collect();
        assert_eq!(memory.get::<i32>(out, 32), expected);

        launch(&image, "stack_array", &Shape::new(1, 32), &[arg(out), arg(30i32)], &memory).unwrap();
        let expected = (0..32i32).map(|thread| {
            let mut local = [0i32; 32];
            (0..30).for_each(|i| local[i * 7 % 32] = i as i32 * thread);
            // Two elements are never written and may be anything; index 29 is the last that is read.
            (0..30).fold(0i32, |sum, i| sum.wrapping_mul(31).wrapping_add(local[i]))
        });
        assert_eq!(memory.get::<i32>(out, 32), expected.collect::<Vec<_>>());
    });
}

#[test]
fn printing_and_asserting() {
    for_each_target("language", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let shape = Shape { workers: 1, ..Shape::new(2, 4) };
        launch(&image, "say", &shape, &[arg(7i32), arg(2.5f64), arg(0u64)], &memory).unwrap();
        let printed = String::from_utf8(memory.printed.lock().clone()).unwrap();
        let line =
            |thread: u32, block: u32| format!("thread {thread} of block {block}:  2.50 word 10000000000\n");
        assert_eq!(printed, [line(7, 0), line(9, 0), line(7, 1), line(9, 1)].concat());

        let input = memory.put(&[1i32, 2, -3, 4]);
        let fault = launch(&image, "check", &Shape::new(1, 4), &[arg(input)], &memory).unwrap_err();
        let text = fault.to_string();
        assert!(
            text.contains("block: [0,0,0], thread: [2,0,0] Assertion `in[threadIdx.x] >= 0` failed."),
            "{text}"
        );
        assert!(text.starts_with("language.cu:"), "{text}");
    });
}

#[test]
fn library_functions_of_doubles() {
    for_each_target("arithmetic", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let values: Vec<f64> = (1..=40).map(|i| f64::from(i) * 1.37).collect();
        let (input, out) = (memory.put(&values), memory.alloc(40 * 64));
        launch(&image, "doubles", &Shape::new(2, 32), &[arg(input), arg(out), arg(40i32)], &memory).unwrap();
        for (x, row) in values.iter().zip(memory.get::<f64>(out, 320).chunks(8)) {
            assert_eq!(row[0], x.sqrt());
            assert_eq!(row[1], x / 7.0);
            assert_eq!(row[6], x.mul_add(*x, -x));
            let near = |actual: f64, expected: f64| {
                assert!(
                    (actual - expected).abs() <= 1e-15 * expected.abs().max(1.0),
                    "{actual} {expected} at {x}"
                );
            };
            near(row[2] / (x / 10.0).exp(), 1.0);
            near(row[3], x.ln());
            near(row[4], x.sin());
            near(row[5] / x.powf(1.5), 1.0);
            assert_eq!(row[7], x.floor() + (x / 2.0).round_ties_even() + x % 1.25);
        }
    });
}

#[test]
fn library_functions_of_floats() {
    for_each_target("arithmetic", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let values: Vec<f32> = (1..=40).map(|i| i as f32 * 1.37).collect();
        let (input, out) = (memory.put(&values), memory.alloc(40 * 32));
        launch(&image, "floats", &Shape::new(2, 32), &[arg(input), arg(out), arg(40i32)], &memory).unwrap();
        for (x, row) in values.iter().zip(memory.get::<f32>(out, 320).chunks(8)) {
            assert_eq!(row[0], x.sqrt());
            assert_eq!(row[1], x / 7.0);
            let expected = [(x / 10.0).exp(), x.ln(), x.sin(), (x / 50.0).tanh(), 1.0 / x.sqrt()];
            for (actual, expected) in row[2..7].iter().zip(expected) {
                assert!(
                    (actual - expected).abs() <= 1e-6 * expected.abs().max(1.0),
                    "{actual} {expected} at {x}"
                );
            }
            assert!((0.0..=1.0).contains(&row[7]));
        }
    });
}

#[test]
fn sixty_four_bit_integers() {
    for_each_target("arithmetic", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let mut state = 88_172_645_463_325_252u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as i64
        };
        let a: Vec<i64> = (0..64).map(|_| next()).collect();
        let b: Vec<i64> = (0..64).map(|i| (next() >> (i % 50)) | 1).collect();
        let (da, db, out) = (memory.put(&a), memory.put(&b), memory.alloc(64 * 80));
        launch(&image, "integers", &Shape::new(2, 32), &[arg(da), arg(db), arg(out), arg(64i32)], &memory)
            .unwrap();
        for (i, row) in memory.get::<i64>(out, 640).chunks(10).enumerate() {
            let (x, y) = (a[i], b[i]);
            let (low_x, low_y) = (x as u32, y as u32);
            let shift = i as u32 & 31;
            let funnel = (u64::from(low_y) << 32 | u64::from(low_x)) << shift >> 32;
            let (bytes_x, bytes_y) = (low_x.to_le_bytes(), low_y.to_le_bytes());
            let permuted = u32::from_le_bytes([bytes_x[0], bytes_y[0], bytes_x[1], bytes_y[1]]);
            let expected = [
                x.wrapping_div(y),
                x.wrapping_rem(y),
                (x as u64 / y as u64) as i64,
                ((i128::from(x) * i128::from(y)) >> 64) as i64,
                i64::from((x as i32).wrapping_div(y as i32 | 1)),
                i64::from(x.leading_zeros() * 100 + y.trailing_zeros() + 1),
                x.reverse_bits(),
                i64::from(permuted),
                i64::from(funnel as u32),
                (x as f32 as i64).wrapping_add(y as f64 as i64),
            ];
            assert_eq!(row, expected, "{x:#x} {y:#x}");
        }
    });
}

#[test]
fn votes_and_shuffles() {
    for_each_target("arithmetic", |text| {
        let mut memory = TestMemory::default();
        let image = image(text, &mut memory);
        let out = memory.alloc(64 * 24);
        launch(&image, "votes", &Shape::new(1, 64), &[arg(out)], &memory).unwrap();
        for (thread, row) in memory.get::<u32>(out, 64 * 6).chunks(6).enumerate() {
            let (thread, lane) = (thread as u32, thread as u32 % 32);
            let up = if lane % 8 >= 3 { thread - 3 } else { thread };
            let sum = if lane < 12 { 66 } else { 496 - 66 };
            assert_eq!(row, [0x4924_9249, 2, thread ^ 5, up, u32::MAX, sum], "thread {thread}");
        }
    });
}
