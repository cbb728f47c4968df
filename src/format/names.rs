//! Enums whose variants have names. One macro call makes the enum, its names and their parsing.

/// Implements `Display` and `FromStr` for a type that has `ALL` and `name`. `$what` is what an error calls such a value.
macro_rules! parsed_by_name {
    ($name:ident, $what:literal) => {
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::error::UnknownName;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let found = Self::ALL.iter().copied().find(|value| value.name() == text);
                found.ok_or_else(|| Self::Err::new($what, text, Self::ALL.iter().map(|value| value.name()).collect()))
            }
        }
    };
}
pub(crate) use parsed_by_name;

/// Defines an enum from its variants and their names: `ALL`, `name`, `Display`, `FromStr`, and the same names in JSON.
macro_rules! named {
    ($(#[$meta:meta])* enum $name:ident as $what:literal { $($(#[$vmeta:meta])* $variant:ident => $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
        #[non_exhaustive]
        pub enum $name { $($(#[$vmeta])* #[serde(rename = $text)] $variant,)+ }

        impl $name {
            /// Every variant, in order.
            pub const ALL: &[$name] = &[$($name::$variant,)+];
            /// The name in the spec, on the command line and in JSON.
            pub const fn name(self) -> &'static str { match self { $($name::$variant => $text,)+ } }
        }

        $crate::format::parsed_by_name!($name, $what);
    };
}
pub(crate) use named;

/// Defines an enum for a registry of the spec, with codes and names.
macro_rules! registry {
    ($(#[$meta:meta])* $name:ident: $repr:ty as $what:literal {
        $($(#[$vmeta:meta])* $variant:ident = $code:literal => $text:literal,)+
    }) => {
        $crate::format::named! {
            $(#[$meta])*
            #[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
            enum $name as $what { $($(#[$vmeta])* $variant => $text,)+ }
        }

        impl $name {
            /// The code in the file.
            pub const fn code(self) -> $repr { match self { $($name::$variant => $code,)+ } }
            /// The entry with this code, if there is one.
            pub const fn from_code(code: $repr) -> Option<Self> { match code { $($code => Some($name::$variant),)+ _ => None } }
        }
    };
}
pub(crate) use registry;
